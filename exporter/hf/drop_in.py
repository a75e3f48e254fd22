"""An artifact as a model of transformers, and as a module of sentence-transformers. Loads torch and transformers."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self

import ml_dtypes
import numpy as np
import torch
import transformers
from transformers import modeling_outputs

from effexport.artifact import Artifact
from effexport.base.errors import UserError
from effexport.export.exported_model import OutputClass, output_class, transformers_class
from effexport.export.onnx_graph import load_graph
from effexport.models.checkpoints.spec import CONFIG, GENERATION_CONFIG
from effexport.runners.runner import Runner, tensors_text

if TYPE_CHECKING:
    from effexport.base.dtypes import Array
    from effexport.runners.decode import EncoderDecoderRunner


class DropIn(transformers.PreTrainedModel):
    """A model of transformers that an artifact computes: for inference, with tensors on the CPU.

    It has no parameters, and so no gradients. What needs PyTorch's weights raises UserError: training, other devices
    and element types, and saving.
    """

    main_input_name = "input_ids"
    _supports_sdpa = True  # of no effect; otherwise, transformers looks for another attention

    def __init__(self, config: Any, artifact: Artifact, runner: Runner, outputs: OutputClass) -> None:
        super().__init__(config)
        self.base_model_prefix = str(config.model_type)
        self.artifact = artifact
        self.runner = runner
        self.output_class = outputs
        if GENERATION_CONFIG in artifact.manifest.files and self.can_generate():
            self.generation_config = transformers.GenerationConfig.from_pretrained(artifact.path)
        self.train(False)

    @property
    def device(self) -> torch.device:
        """The device of inputs and outputs: the CPU, also if the runtime computes on a GPU."""
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.artifact.spec.dtype)  # type: ignore[no-any-return]

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        return_dict: bool | None = None,
        **others: Any,
    ) -> Any:
        """The outputs in their class of transformers, or as a tuple if `return_dict` is false.

        others: the other inputs of the artifact, if it has any; arguments of transformers that ask for nothing, such as
        labels=None, are accepted.
        Raises UserError for inputs that do not fit, and for anything that an artifact does not have, such as labels.
        """
        given = {"input_ids": input_ids, "attention_mask": attention_mask, "token_type_ids": token_type_ids, **others}
        outputs = self.runner.run(self.feeds({name: value for name, value in given.items() if asks_for(value)}))
        tensors = [tensor_from_array(outputs[tensor.name]) for tensor in self.runner.outputs]
        if return_dict is False or (return_dict is None and not getattr(self.config, "return_dict", True)):
            return tuple(tensors)
        kind = getattr(modeling_outputs, self.output_class.name)
        return kind(**dict(zip(self.output_class.fields, tensors, strict=True)))

    def feeds(self, given: dict[str, Any]) -> dict[str, Array]:
        """The inputs as arrays. Segments are left out if the model knows none and every token is in the first."""
        dtypes = {tensor.name: tensor.dtype for tensor in self.runner.inputs}
        segments = "token_type_ids"
        if segments in given and segments not in dtypes and not np.asarray(given[segments]).any():
            del given[segments]
        for name in given:
            if name not in dtypes:
                raise UserError(
                    f"{name} was given to an artifact, which runs for inference only and has no hidden states, "
                    f"attention weights or cache to return; expected: {tensors_text(self.runner.inputs)}"
                )
        return {name: array_from_tensor(name, value, dtypes[name]) for name, value in given.items()}

    def train(self, mode: bool = True) -> Self:
        if mode:
            refuse("train()", "train the PyTorch model, and export it again")
        return super().train(False)  # type: ignore[no-any-return]

    def to(self, *args: Any, **options: Any) -> Self:  # type: ignore[override]
        """Accept the CPU and the artifact's own element type. Raises UserError for others."""
        for wanted in (*args, *options.values()):
            if isinstance(wanted, torch.dtype) and wanted != self.dtype:
                refuse(f"to({wanted})", "build the artifact with another --precision")
            is_device = isinstance(wanted, (int, str, torch.device)) and not isinstance(wanted, bool)
            if is_device and not str(wanted).startswith("cpu"):
                refuse(
                    f"to({str(wanted)!r})",
                    "tensors stay on the CPU, so give device='cpu' to a pipeline; to compute on a GPU, open the "
                    "artifact with runtime='ort-cuda'",
                )
        return self

    def cuda(self, *args: Any, **options: Any) -> Self:  # type: ignore[override]
        return self.to("cuda")

    def half(self, *args: Any) -> Self:
        return self.to(torch.float16)

    def float(self, *args: Any) -> Self:
        return self.to(torch.float32)

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Numbers in the weights of the graph, which may have tied weights twice; none of them can be trained."""
        if exclude_embeddings:
            refuse("num_parameters(exclude_embeddings=True)", "a graph does not say which weights are embeddings")
        weights = load_graph(self.artifact.model_path).graph.initializer
        return 0 if only_trainable else sum(math.prod(weight.dims) for weight in weights)

    def save_pretrained(self, *args: Any, **options: Any) -> NoReturn:
        refuse("save_pretrained()", f"copy the folder {self.artifact.path}")


class CausalDropIn(transformers.GenerationMixin, DropIn):  # type: ignore[misc]
    """A drop-in that continues texts with transformers' `generate`. Each token runs the model over all before it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.generation_config.use_cache = False

    def prepare_inputs_for_generation(  # type: ignore[override]
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **options: Any
    ) -> dict[str, Any]:
        return {"input_ids": input_ids, "attention_mask": attention_mask}


class GenerationState(dict[str, torch.Tensor]):
    """The state of an EncoderDecoderRunner between two calls, as transformers' `generate` carries it along.

    cached: the names of what grows with each token; the rest belongs to the source.
    """

    def __init__(self, state: Mapping[str, Array], cached: Sequence[str]) -> None:
        super().__init__({name: tensor_from_array(array) for name, array in state.items()})
        self.cached = tuple(cached)

    @property
    def length(self) -> int:
        """The number of tokens so far."""
        return int(self[self.cached[0]].shape[2])

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Choose the rows of a beam search, which stay within their sample and so keep its source."""
        self.update({name: self[name].index_select(0, beam_idx) for name in self.cached})


class SourceReader(torch.nn.Module):
    """The encoder of a Seq2SeqDropIn: a source → the state before the first token, as encoder_outputs."""

    def __init__(self, model: Seq2SeqDropIn) -> None:
        super().__init__()
        self.read = model.read

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        global_attention_mask: torch.Tensor | None = None,
        return_dict: bool | None = None,
        **others: Any,
    ) -> GenerationState:
        source = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "global_attention_mask": global_attention_mask,
            **others,
        }
        return self.read({name: value for name, value in source.items() if asks_for(value)})


class Seq2SeqDropIn(transformers.GenerationMixin, DropIn):  # type: ignore[misc]
    """A drop-in that reads a source once and writes a target with transformers' `generate`, token by token.

    A call with a whole target runs the whole model. The graphs that decode are opened with the first `generate`.
    """

    def __init__(self, *args: Any, open_decoder: Callable[[], EncoderDecoderRunner]) -> None:
        super().__init__(*args)
        self._open_decoder = functools.cache(open_decoder)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """False: the state is our own."""
        return False

    def get_encoder(self) -> SourceReader:
        return SourceReader(self)

    def read(self, source: dict[str, Any]) -> GenerationState:
        """Raises UserError for inputs that do not fit."""
        decoder = self._open_decoder()
        decoder.encode(self.feeds(source))
        return GenerationState(decoder.state, decoder.cached)

    def forward(  # type: ignore[override]
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        global_attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        encoder_outputs: GenerationState | None = None,
        past_key_values: GenerationState | None = None,
        return_dict: bool | None = None,
        **others: Any,
    ) -> Any:
        """The logits of a target for a source; or of the next tokens, for the state that the encoder or an earlier call
        returned. Raises as `DropIn.forward`, and for a state of another model."""
        others |= {"global_attention_mask": global_attention_mask, "decoder_input_ids": decoder_input_ids}
        state = encoder_outputs if past_key_values is None else past_key_values
        if state is None:
            return super().forward(input_ids, attention_mask, return_dict=return_dict, **others)
        if not isinstance(state, GenerationState):
            refuse(f"a state that is a {type(state).__name__}", "give what get_encoder() or an earlier call returned")
        given = self.feeds({name: value for name, value in others.items() if asks_for(value)})
        decoder = self._open_decoder()
        decoder.state = {name: array_from_tensor(name, value, "") for name, value in state.items()}
        tokens = given[decoder.token.name]
        columns = [tokens[..., i : i + 1] for i in range(max(1, tokens.shape[-1]))]
        steps = [decoder.step({**given, decoder.token.name: column})["logits"] for column in columns]
        answer = modeling_outputs.Seq2SeqLMOutput(
            logits=torch.cat([tensor_from_array(step) for step in steps], dim=1),  # type: ignore[arg-type]
            past_key_values=GenerationState(decoder.state, decoder.cached),  # type: ignore[arg-type]
        )
        return answer.to_tuple() if return_dict is False else answer

    def prepare_inputs_for_generation(  # type: ignore[override]
        self,
        input_ids: torch.Tensor,
        past_key_values: GenerationState | None = None,
        encoder_outputs: GenerationState | None = None,
        **kwargs: Any,  # transformers refuses arguments that neither this nor `forward` has by this name
    ) -> dict[str, Any]:
        done = 0 if past_key_values is None else past_key_values.length
        state = {"past_key_values": past_key_values, "encoder_outputs": encoder_outputs}
        return {**state, "decoder_input_ids": input_ids[:, done:]}


def refuse(what: str, remedy: str) -> NoReturn:
    raise UserError(f"{what} does not work with an artifact, which ONNX Runtime or TensorRT runs; {remedy}")


def drop_in_from_runner(artifact: Artifact, runner: Runner, open_decoder: Callable[[], EncoderDecoderRunner]) -> DropIn:
    """open_decoder: opens the graphs that decode of an encoder-decoder. Raises UserError for an artifact whose outputs
    no model of transformers has."""
    outputs = output_class(artifact.spec)
    if outputs is None:
        found = tensors_text(artifact.spec.outputs)
        raise UserError(
            f"{artifact.path} returns {found}, which no model of transformers does; run it with effexport.load, or "
            "effexport.load_text"
        )
    # pipelines compare the name of the class with those that they know for their task
    name = transformers_class(artifact.spec) or DropIn.__name__
    base: type[DropIn] = CausalDropIn if outputs.name == "CausalLMOutput" else DropIn
    options: dict[str, Any] = {}
    if artifact.spec.model.decoder is not None:
        base, options = Seq2SeqDropIn, {"open_decoder": open_decoder}
    kind: type[DropIn] = type(name, (base,), {"__module__": __name__})
    return kind(config_of(artifact), artifact, runner, outputs, **options)


def config_of(artifact: Artifact) -> Any:
    """The configuration in the artifact, for its task; a minimal one if it has none."""
    model = artifact.spec.model
    if CONFIG in artifact.manifest.files:
        config = transformers.AutoConfig.from_pretrained(artifact.path)
    else:
        limits = model.input_limits
        config = transformers.PretrainedConfig(pad_token_id=model.pad_token_id)
        config.vocab_size = limits.get("input_ids")
        config.max_position_embeddings = model.max_seq_len
    if (name := transformers_class(artifact.spec)) is not None:
        config.architectures = [name]
    return config


def asks_for(value: Any) -> bool:
    """True if an argument was given: None and False are defaults of transformers' functions."""
    return value is not None and value is not False


def array_from_tensor(name: str, value: Any, dtype: str) -> Array:
    """A tensor, or what numpy can read, as an array; integers and booleans of other sizes are converted to `dtype`."""
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            raise UserError(f"{name} is on {value.device}; expected a tensor on the CPU: {name}.cpu()")
        value = value.detach()
        if value.dtype == torch.bfloat16:
            bits: Array = value.view(torch.int16).numpy()
            return bits.view(ml_dtypes.bfloat16)
    array: Array = np.asarray(value)
    return array.astype(dtype) if dtype == "int64" and array.dtype.kind in "bi" else array


def tensor_from_array(array: Array) -> torch.Tensor:
    """The same numbers as a tensor on the CPU."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


# field of the drop-in's outputs → the feature that sentence-transformers takes it for
FEATURES = {"pooler_output": "sentence_embedding", "last_hidden_state": "token_embeddings"}


class Sentences(torch.nn.Module):
    """The first module of a SentenceTransformer: texts → tokens → the embeddings that an artifact computes."""

    def __init__(self, model: DropIn, tokenizer: Any) -> None:
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer
        self.max_seq_length = model.artifact.spec.model.max_seq_len

    def preprocess(self, inputs: Sequence[Any], prompt: str | None = None, **options: Any) -> dict[str, torch.Tensor]:
        """Tokens of texts, or of pairs of texts, padded to the longest and cut at `max_seq_length` tokens."""
        texts = [prompt + text for text in inputs] if prompt else list(inputs)
        limit = self.max_seq_length
        return dict(
            self.tokenizer(texts, padding=True, truncation=limit is not None, max_length=limit, return_tensors="pt")
        )

    # what sentence-transformers before 5.4 calls it
    tokenize = preprocess

    def forward(self, features: dict[str, Any], **options: Any) -> dict[str, Any]:
        """Add the embeddings to the features, which hold the inputs of the artifact."""
        names = [tensor.name for tensor in self.model.runner.inputs]
        outputs = self.model(**{name: features[name] for name in names if name in features})
        return {**features, **{FEATURES[field]: value for field, value in outputs.items()}}

    def get_embedding_dimension(self) -> int:
        """Width of an embedding."""
        width = self.model.artifact.spec.outputs[0].dims[-1]
        assert isinstance(width, int)
        return width

    get_word_embedding_dimension = get_embedding_dimension
    get_sentence_embedding_dimension = get_embedding_dimension

    def save(self, path: str, *args: Any, **options: Any) -> None:
        """Raises UserError: the artifact is the saved model."""
        self.model.save_pretrained(path)


def sentences_from_model(model: DropIn) -> Sentences:
    """Raises UserError for an artifact that returns something else than embeddings, or has no tokenizer."""
    path = model.artifact.path
    if not set(model.output_class.fields) <= FEATURES.keys():
        found = tensors_text(model.runner.outputs)
        raise UserError(f"{path} returns {found}; expected embeddings: build it with --pool mean, or the task base")
    return Sentences(model, tokenizer_of(path))


def tokenizer_of(path: Path) -> Any:
    """The tokenizer in an artifact. Raises UserError if there is none."""
    try:
        return transformers.AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} has no tokenizer that transformers can read; build it with --tokenizer DIR") from error
