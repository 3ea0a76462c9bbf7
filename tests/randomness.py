"""How many examples a costly random test runs: few, the same for everybody, in `make test`; all in `make test-all`."""

from hypothesis import settings


def examples(all_of_them: int) -> int:
    return all_of_them if settings.get_current_profile_name() == "random" else max(1, all_of_them // 3)
