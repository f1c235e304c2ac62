"""Upload of a merged folder to the Hugging Face hub: the only module here that uses the network, when asked."""

from __future__ import annotations

from pathlib import Path

from rlflow.utils.errors import ConfigError, RlflowError


def check_token() -> None:
    """Refuse early, before hours of merging, when an upload has no credentials.

    Raises:
        ConfigError: no token.
    """
    from huggingface_hub import get_token

    if get_token() is None:
        raise ConfigError(
            "--hf_upload_path needs a token with write access, and there is none: set HF_TOKEN, or run `hf auth login`"
        )


def upload(folder: Path, repo_id: str, *, private: bool) -> str:
    """Create the repository when it is new and upload the folder; returns its address.

    Raises:
        RlflowError: the hub refuses or cannot be reached.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        address = api.create_repo(repo_id, private=private, exist_ok=True)
        api.upload_folder(folder_path=folder, repo_id=repo_id, commit_message="Merged from an rlflow checkpoint")
    except Exception as error:  # noqa: BLE001 - the client raises errors of whichever HTTP library it is built on
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise RlflowError(f"{folder} was merged, but not uploaded to {repo_id}: {first}") from error
    return str(address)
