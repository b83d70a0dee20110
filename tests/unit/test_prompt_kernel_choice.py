"""Which kernel computes prompts: ours for Hopper where the card and the layers are for it and its numbers are right."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from common.engine.gpu import prompt_plans
from common.ops import backend
from common.ops.attention.form import AttentionForm
from common.ops.attention.settings import AttentionSettings

SETTINGS = AttentionSettings()


def decoder(*forms: AttentionForm, head_dim: int = 64, dtype: torch.dtype = torch.bfloat16) -> Any:
    config = SimpleNamespace(num_heads=4, num_kv_heads=2, head_dim=head_dim)
    layers = [SimpleNamespace(mixer=SimpleNamespace(form=form)) for form in forms]
    return SimpleNamespace(config=config, dtype=dtype, device=torch.device("cpu"), layers=layers)


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "has_warpgroup_products", lambda device: True)


def chosen(model: Any, settings: AttentionSettings = SETTINGS) -> str:
    return prompt_plans.with_prompt_kernel(settings, model).prefill_backend


def test_a_hopper_card_takes_the_kernel_and_other_cards_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder(AttentionForm(0.1), AttentionForm(0.1, window=30))
    assert chosen(model) == "hopper"
    monkeypatch.setattr(backend, "has_warpgroup_products", lambda device: False)
    assert chosen(model) == "cudnn"


def test_layers_that_it_does_not_compute_leave_others_to_it() -> None:
    capped = AttentionForm(0.1, soft_cap=30.0)
    assert chosen(decoder(capped)) == "cudnn"
    assert chosen(decoder(capped, AttentionForm(0.1))) == "hopper"
    assert chosen(decoder(AttentionForm(0.1), head_dim=256)) == "cudnn"
    assert chosen(decoder(AttentionForm(0.1), dtype=torch.float32)) == "cudnn"


@pytest.mark.parametrize("settings", [AttentionSettings(batch_invariant=True), AttentionSettings(prefill_backend="kernel")])
def test_settings_that_want_another_way_get_it(settings: AttentionSettings) -> None:
    assert chosen(decoder(AttentionForm(0.1)), settings) == settings.prefill_backend


@pytest.mark.parametrize("fault", [TypeError("no such argument"), ImportError("gluon"), RuntimeError("refused"), None])
def test_a_kernel_that_fails_or_is_wrong_is_left_out(monkeypatch: pytest.MonkeyPatch, fault: Exception | None) -> None:
    def compute(*_: Any) -> bool:
        if fault is not None:
            raise fault
        return False

    monkeypatch.setattr(prompt_plans, "prompts_are_right", compute)
    assert chosen(decoder(AttentionForm(0.1))) == "cudnn"


def test_too_little_memory_is_no_fault_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def compute(*_: Any) -> bool:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(prompt_plans, "prompts_are_right", compute)
    with pytest.raises(torch.OutOfMemoryError):
        chosen(decoder(AttentionForm(0.1)))
