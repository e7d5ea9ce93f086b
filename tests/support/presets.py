"""The models of examples/presets: the rows of the table in docs/presets.md, and what plans of them found before."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from superadam.cli.plan.presets import Preset, presets
from superadam.offload.needs import needs_of
from superadam.plan import memory
from superadam.plan.models import on_meta

PRESETS = presets()


def row(name: str, preset: Preset) -> str:
    setting, model = preset.setting, on_meta(preset.config)
    needs = [needs_of(one, is_on_host=False, storage=setting.storage) for one in model.parameters()]
    state = sum(each.state for each in needs) / 10**9
    link = f"[`{name}`](../examples/presets/{name}.yaml)"
    size = f"{setting.sequences} x {setting.tokens}"
    return f"| {link} | {setting.ranks} | {size} | {preset.parameters:,} | {state:.0f} |"


_FOUND: dict[Any, dict[str, int]] = {}


@pytest.fixture(scope="module", autouse=True)
def peaks_found_once() -> Iterator[None]:
    """Find the peaks of a model in a setting once, in a file that imports this; running it again takes seconds."""
    find: Callable[..., dict[str, int]] = memory.peaks_of

    def found(config: Any, *sizes: int, **how: Any) -> dict[str, int]:
        key = config.to_json_string(), sizes, tuple(how.items())
        if key not in _FOUND:
            _FOUND[key] = find(config, *sizes, **how)
        return _FOUND[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "peaks_of", found)
        yield
