"""Whether the Hugging Face hub answers, asked once: its libraries try for a minute before they say that it does not."""

from pathlib import Path


def unreachable(name: str, repo_type: str) -> str | None:
    """Why nothing of the hub's `name` can be fetched; None for a folder, and where the hub answers, whatever it says.

    repo_type: model or dataset.
    """
    if Path(name).is_dir():
        return None
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        HfApi().repo_info(name, repo_type=repo_type, timeout=10)
    except HfHubHTTPError:
        return None
    # Wrong names, an offline mode, name servers, proxies and certificates have types of several libraries.
    except Exception as error:
        return (str(error).splitlines() or [type(error).__name__])[0]
    return None
