"""Measure generation: its cost over the bare decode step, its speed with many sessions, and whether any token is wrong.

    python scripts/bench_generate.py artifacts/writer

Every number is the median of rounds in which the candidates take turns, so that a busy machine slows all of them. A
token of a session among others is wrong if it differs from that of the session alone, unless the two logits differ by
no more than rounding; such near ties are counted too.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "support")]

from serving_load import ServerProcess, running_server  # noqa: E402

from effexport.artifact import open_artifact  # noqa: E402
from effexport.generation.sampling import Sampling  # noqa: E402
from effexport.generation.text_generator import (  # noqa: E402
    Session,
    TextGenerator,
    generator_from_artifact,
)
from effexport.runners.artifact_runner import decoder_from_artifact  # noqa: E402
from effexport.runners.options import RunOptions  # noqa: E402

SESSIONS = (1, 8, 64)
# float32 rounds to 6e-8; sums over some hundred terms, in another order, stay below this share of the largest logit
ROUNDING = 1e-5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--tokens", type=int, default=100, help="new tokens of each text")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=None)
    arguments = parser.parse_args()
    artifact, options = open_artifact(arguments.artifact), RunOptions(threads=arguments.threads)
    with generator_from_artifact(artifact, lambda it: decoder_from_artifact(it, options=options)) as generator:
        result = {
            "one session": shares_of_bare(generator, arguments.tokens, arguments.rounds),
            "tokens/s": speeds(generator, arguments.tokens, max(3, arguments.rounds // 5)),
            "among others": differences(generator, arguments.tokens),
            "over HTTP": over_http(generator, arguments.artifact, arguments.tokens),
        }
    print(json.dumps(result, indent=2))


def shares_of_bare(generator: TextGenerator, tokens: int, rounds: int) -> dict[str, float]:
    """Microseconds of a token, and the speed as a share of `decoder.step` alone."""
    decoder, feeds = generator.stepper.decoder, {"input_ids": np.array([[70]])}

    def bare() -> None:
        decoder.step(feeds)

    def generated(sampling: Sampling) -> Callable[[], None]:
        session = generator.session("Hello", sampling)
        generator.stepper.add(session)
        generator.stepper.step()
        return lambda: drain(generator, [session])

    kinds = {
        "greedy": Sampling(max_new_tokens=tokens, temperature=0),
        "sampled": Sampling(max_new_tokens=tokens),
        "top 40": Sampling(max_new_tokens=tokens, top_k=40),
    }
    times: dict[str, list[float]] = {name: [] for name in ("bare", *kinds)}
    for _ in range(rounds):
        decoder.prefill({"input_ids": [[70, 71, 72, 73, 74]]})
        times["bare"] += timed(bare, tokens - 1)
        decoder.reset()
        for name, sampling in kinds.items():
            times[name] += timed(generated(sampling), tokens - 1)
            generator.stepper.step()  # drops the session
    medians = {name: 1e6 * statistics.median(found) for name, found in times.items()}
    return {f"{name} us": round(value, 1) for name, value in medians.items()} | {
        f"{name} / bare speed": round(medians["bare"] / medians[name], 3) for name in kinds
    }


def timed(call: Callable[[], None], count: int) -> list[float]:
    times = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


def drain(generator: TextGenerator, sessions: list[Session]) -> None:
    generator.stepper.step()
    for session in sessions:
        session.pieces.clear()


def speeds(generator: TextGenerator, tokens: int, rounds: int) -> dict[int, int]:
    """New tokens per second by number of sessions, prompts included."""
    found: dict[int, list[float]] = {count: [] for count in SESSIONS}
    for _ in range(rounds):
        for count, speed in found.items():
            sessions = [generator.session("Hello", Sampling(max_new_tokens=tokens, seed=i)) for i in range(count)]
            start = time.perf_counter()
            for session in sessions:
                generator.stepper.add(session)
            while generator.stepper.sessions:
                drain(generator, sessions)
            speed.append(count * tokens / (time.perf_counter() - start))
            generator.stepper.step()
    return {count: round(statistics.median(speed)) for count, speed in found.items()}


Choices = list[tuple[int, np.ndarray]]


def choices(generator: TextGenerator, prompts: list[str], tokens: int) -> list[Choices]:
    """Greedy texts of sessions together: each token with the logits that it was chosen from."""
    found: list[Choices] = []

    def watch(session: Session) -> None:
        seen: Choices = []
        found.append(seen)
        take = session.take

        def watched(logits: np.ndarray) -> None:
            take(logits)
            seen.append((session.token, logits.copy()))

        session.take = watched  # type: ignore[method-assign]
        generator.stepper.add(session)

    for prompt in prompts:
        watch(generator.session(prompt, Sampling(max_new_tokens=tokens, temperature=0)))
    while generator.stepper.sessions:
        generator.stepper.step()
    generator.stepper.step()  # drops them
    return found


def differences(generator: TextGenerator, tokens: int) -> dict[str, float]:
    """Texts of the largest number of sessions together, against each alone."""
    rng = np.random.default_rng(0)
    prompts = ["".join(map(chr, rng.integers(97, 123, 3 + number % 30))) for number in range(SESSIONS[-1])]
    counts = {"tokens": 0, "rows with other bits": 0, "near ties": 0, "wrong tokens": 0}
    worst = 0.0
    for prompt, among in zip(prompts, choices(generator, prompts, tokens), strict=True):
        (alone,) = choices(generator, [prompt], tokens)
        for (own, row), (other, joined) in zip(alone, among, strict=True):
            counts["tokens"] += 1
            counts["rows with other bits"] += not np.array_equal(row, joined)
            worst = max(worst, float(np.abs(row - joined).max()))
            if own != other:
                is_tie = abs(float(row[own] - row[other])) <= ROUNDING * float(np.abs(row).max())
                counts["near ties" if is_tie else "wrong tokens"] += 1
                break  # the texts differ from here on
    return {**counts, "largest difference of a logit": worst}


def over_http(generator: TextGenerator, artifact: Path, tokens: int) -> dict[str, object]:
    """New tokens per second of clients of `generate_stream`, which run in this process, and wrong texts."""
    speeds: dict[int, int] = {}
    wrong = 0
    with (
        tempfile.TemporaryDirectory() as folder,
        running_server(artifact, Path(folder)) as server,
    ):
        for count in SESSIONS:
            seeds = range(4 * count)  # each client asks four times
            start = time.perf_counter()
            with ThreadPoolExecutor(count) as clients:
                answers = list(clients.map(lambda seed: streamed(server, tokens, seed), seeds))
            speeds[count] = round(len(seeds) * tokens / (time.perf_counter() - start))
            for seed, answer in zip(seeds, answers, strict=True):
                alone = generator("Hello", Sampling(max_new_tokens=tokens, seed=seed))
                wrong += answer != list(alone.tokens)
    return {"tokens/s": speeds, "wrong texts": wrong, "texts": sum(4 * count for count in SESSIONS)}


def streamed(server: ServerProcess, tokens: int, seed: int) -> list[int]:
    """The tokens of all events of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    body = json.dumps({"text_input": "Hello", "max_new_tokens": tokens, "seed": seed})
    connection.request("POST", f"/v2/models/{server.model}/generate_stream", body)
    events = connection.getresponse().read().decode().split("\n\n")[:-1]
    connection.close()
    return [token for event in events for token in json.loads(event.removeprefix("data: "))["tokens"]]


if __name__ == "__main__":
    main()
