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
    public key: effexport verify ARTIFACT --identity PUBLIC.pem. With --sigstore, a public log keeps your identity for
    good; to check, give it and who confirmed it: --identity NAME --identity-provider URL.
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
                "signed_by": signed.signed_by,
                "identity_provider": signed.provider,
                "files": signed.files,
            }
        )
    if signed.provider is None:
        who = f"with the key whose public half has the SHA-256 {signed.signed_by}"
    else:
        who = f"as {signed.signed_by}, which {signed.provider} confirmed"
    say(
        result_console(as_json=as_json),
        f"{signed.folder / SIGNATURE}: signs {counted(len(signed.files), 'file')} {who}",
    )
