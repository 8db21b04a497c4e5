"""The models that all subjects serve: tiny and random, so that the way to them is what is measured."""

import sys
from pathlib import Path

_TESTS = Path(__file__).resolve().parent.parent / "tests"


def use_tests() -> None:
    """Let the makers of the tests' models be imported."""
    if str(_TESTS) not in sys.path:
        sys.path.append(str(_TESTS))


def write_models(folder: Path, *names: str) -> Path:
    """Write tiny models of these names to a new folder and return that."""
    use_tests()
    from tiny import tiny_model

    models = folder / "models"
    models.mkdir()
    for seed, name in enumerate(names):
        tiny_model(models / f"{name}.gguf", seed)
    return models
