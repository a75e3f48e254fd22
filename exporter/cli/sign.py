"""`effexport sign`."""

from __future__ import annotations

from effexport import api
from effexport.base.formatting import counted, say
from effexport.cli._console import result_console
from effexport.cli._verbs import verb
from effexport.options import SignOptions


@verb("sign", SignOptions)
def command(options: SignOptions, as_json: bool) -> None:
    """Sign an artifact and its verdict, so that others can check who made it, and that nothing was changed.

    Writes model.sig, of all files, in the format of OpenSSF Model Signing, and verdict.intoto.json, of the report. A
    key with a password needs it in the environment variable EFFEXPORT_KEY_PASSWORD. To check an artifact, give the
    public key: effexport verify ARTIFACT --identity PUBLIC.pem.
    """
    from effexport.cli.main import print_json
    from effexport.signature import SIGNATURE, VERDICT

    signed = api.signed(options)
    if as_json:
        print_json(
            {
                "artifact": str(options.artifact),
                "signature": SIGNATURE,
                "verdict": VERDICT,
                "key_sha256": signed.key_sha256,
                "files": signed.files,
            }
        )
    say(
        result_console(as_json=as_json),
        f"{signed.folder / SIGNATURE}: signs {counted(len(signed.files), 'file')} with the key whose public half has "
        f"the SHA-256 {signed.key_sha256}",
    )
