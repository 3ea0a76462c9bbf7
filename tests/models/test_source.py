"""Which names of models are folders, and which are left to a download."""

from pathlib import Path

import pytest

from leyden.config import ConfigError
from leyden.models.source import find_local_model


def test_a_name_of_hugging_face_is_downloaded_although_a_folder_has_its_organisation(tmp_path: Path) -> None:
    (tmp_path / "Qwen" / "Qwen3-0.6B").mkdir(parents=True)
    assert find_local_model("Qwen/Qwen3-1.7B", str(tmp_path)) is None


@pytest.mark.parametrize("name", ["mine/step-7", "runs/mine/step-7", "./mine/none", "/nowhere/at/all"])
def test_a_missing_folder_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no folder"):
        find_local_model(name, str(tmp_path))
