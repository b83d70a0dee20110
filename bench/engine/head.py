"""What a head gives in a GPU's steps, at a known acceptance: the decode scheduler and an engine, without a bus.

    python -m bench.engine.head --rows 1,8,32 --accuracy 0.9,0.7,0.3
    python -m bench.engine.head --rows 1 --accuracy 0 --turns 5      what it costs where nothing it drafts holds

The target counts (`common/models/shapes.py`), and the head has the shape of EAGLE-3's for it, or with --kind mtp that of an MTP
layer, which drafts from the whole vocabulary. Its weights are random: everything is computed, and then its token is replaced by
the one that follows, or, behind a share of all tokens, by another one. Modes:

    off      without proposals: the pace that the others are compared with
    bf16     the head's linears in bfloat16
    fp8      in 8 bits, as a decode worker has them on cards that know FP8

What is drafted and verified is up to the policy of a decode worker. One mode comes after the other, since each has graphs of
its own, and each case --turns times, after one that does not count; medians. The columns are those of `bench.engine.lookup`;
"pass ms": the head's first pass of a step, and a later one. Needs a GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, get_args

import torch

from bench.common.machine import describe
from bench.common.table import markdown
from bench.engine.lookup import TITLES, Case, Found, generate, lines_of
from bench.engine.opening import PRECISIONS, open_runner
from common.engine.board import HEAD_SLOTS, HeadSlots
from common.engine.gpu import runner as runners
from common.engine.gpu.head import DeviceHead
from common.models.head_config import HeadKind, HeadSpec, mtp_spec, usual_layers
from common.models.head_model import head_model
from common.models.head_weights import HeadTensors
from common.models.spec import RopeSpec
from common.ops.drafting.head_inputs import TargetStep
from common.ops.drafting.head_layer_tensors import HeadLayerTensors
from common.ops.drafting.head_rows import advance_drafts
from common.ops.linear.weight import PackFormat
from services.decode.device_head import DeviceHeadDrafts
from services.decode.proposers import Proposers
from services.decode.speculation import DraftBook
from services.decode.speculation_policy import SpeculationPolicy

FORMATS: dict[str, PackFormat] = {"bf16": "plain", "fp8": "fp8"}
MODES = ("off", *FORMATS)


class ReplayingHead(DeviceHead):
    """Drafts the token that follows, or the next one where `wrong` is 1 (int64 [vocab_size]), whatever it computes."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.wrong = torch.zeros(self._model.spec.vocab_size, dtype=torch.int64, device=self._device)
        self._last = torch.zeros(HEAD_SLOTS, dtype=torch.int64, device=self._device)

    def _compute_first(self, target: TargetStep, states: torch.Tensor, query_starts: torch.Tensor, max_queries: int) -> None:
        super()._compute_first(target, states, query_starts, max_queries)
        torch.index_select(self._first.nexts, 0, self._rows.selected, out=self._last)

    def _draw(self, draw: Any) -> None:
        self._sample(draw)
        last = self._last[: draw.size]
        last += 1 + self.wrong[last]
        advance_drafts(last, self._rows, self._board)


def tensors_of(runner: Any, kind: HeadKind, draft_vocab: int) -> HeadTensors:
    """Return a head for the runner's model: one of its layers, random. draft_vocab: tokens that one of EAGLE-3's proposes."""
    model, device, dtype = runner.decoder.config, runner.decoder.device, runner.decoder.dtype
    mixer, hidden, middle = model.layers[0].mixer, model.hidden_size, model.layers[0].mlp.intermediate_size
    eagle = HeadSpec(
        hidden_size=hidden,
        intermediate_size=middle,
        num_heads=mixer.num_heads,
        num_kv_heads=mixer.num_kv_heads,
        head_dim=mixer.head_dim,
        rope=RopeSpec(),
        rms_eps=model.rms_eps,
        vocab_size=model.vocab_size,
        draft_vocab_size=draft_vocab,
        layers=usual_layers(model.num_layers),
    )

    spec = eagle if kind == "eagle3" else mtp_spec(model)

    def made(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device).normal_(0, 0.02)

    def ones() -> torch.Tensor:
        return torch.ones(hidden, dtype=dtype, device=device)

    layer = HeadLayerTensors(
        qkv=made(mixer.query_size + 2 * mixer.kv_size, spec.qkv_inputs),
        output=made(hidden, mixer.query_size),
        mlp_norm=ones(),
        gate_up=made(2 * middle, hidden),
        down=made(hidden, middle),
        input_norm=ones() if kind == "mtp" else None,
        qkv_bias=made(mixer.query_size + 2 * mixer.kv_size) if spec.qkv_bias else None,
    )
    return HeadTensors(
        spec=spec,
        fc=made(hidden, spec.fc_inputs),
        embedding_norm=ones(),
        feature_norm=ones(),
        layers=(layer,),
        norm=ones(),
        lm_head=made(draft_vocab, hidden) if kind == "eagle3" else runner.decoder.head,
        ids=torch.arange(spec.draft_vocab_size),
        embedding=runner.decoder.embedding,
    )


def proposers_of(mode: str, depth: int, slots: HeadSlots) -> Proposers | None:
    """As a decode worker makes them; None for `off`."""
    if mode == "off":
        return None
    policy = SpeculationPolicy(max_tokens=depth, max_step_tokens=256)
    return Proposers(DraftBook(policy, vocab_size=1 << 20), device_head=DeviceHeadDrafts(policy, slots))


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.engine.head", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="dummy:llama-3.1-8b-counting", help="a dummy model that counts")
    parser.add_argument("--precision", default="bf16", choices=list(PRECISIONS))
    parser.add_argument("--rows", type=_numbers(int), default=[1, 8, 32], help="rows at once; several between commas")
    parser.add_argument("--accuracy", type=_numbers(float), default=[0.8], help="of drafted tokens; several between commas")
    parser.add_argument("--modes", type=lambda text: text.split(","), default=list(MODES), help=f"of {', '.join(MODES)}")
    parser.add_argument("--depth", type=int, default=7, help="tokens of a proposal, at most")
    parser.add_argument("--kind", default="eagle3", choices=list(get_args(HeadKind)), help="of the head")
    parser.add_argument("--draft-vocab", type=int, default=32_000, help="tokens that a head of EAGLE-3's shape can propose")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--output", type=int, default=512, help="tokens of a row")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--token-budget", type=int, default=2048)
    options = parser.parse_args(argv)
    if unknown := set(options.modes) - set(MODES):
        parser.error(f"no such mode: {', '.join(sorted(unknown))}")
    if not torch.cuda.is_available():
        parser.error("there is no GPU")
    return options


def _numbers(kind: Any) -> Any:
    return lambda text: [kind(part) for part in text.split(",") if part]


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    opening = open_runner(
        options.model,
        options.precision,
        device="cuda",
        max_running=max(options.rows),
        token_budget=options.token_budget,
        max_model_len=options.prompt + options.output + options.depth + 16,
    )
    runner: Any = opening.runner
    runners.DeviceHead = ReplayingHead  # type: ignore[misc]
    found: dict[tuple[float, int], dict[str, list[Found]]] = {}
    answers: dict[tuple[float, int], dict[str, list[list[int]]]] = {}
    passes: dict[str, str] = {}
    for mode in options.modes:
        if mode != "off":
            tensors = tensors_of(runner, options.kind, min(options.draft_vocab, runner.vocab_size))
            decoder = runner.decoder
            runner.attach_head(head_model(tensors, dtype=decoder.dtype, device=decoder.device, format=FORMATS[mode]))
        for accuracy in options.accuracy:
            for rows in options.rows:
                one = found.setdefault((accuracy, rows), {}).setdefault(mode, [])
                slots = HeadSlots()
                proposers = proposers_of(mode, options.depth, slots)
                if mode != "off":
                    dice = torch.Generator().manual_seed(1)
                    with torch.inference_mode():
                        runner._head.wrong.copy_(torch.rand(runner.vocab_size, generator=dice) >= accuracy)
                for turn in range(options.turns + 1):
                    result, answer = generate(
                        runner, Case(rows, 0, options.prompt, options.output), proposers, options.token_budget
                    )
                    one += [result] if turn else []
                    answers.setdefault((accuracy, rows), {})[mode] = answer
                if proposers is not None and proposers.device_head is not None:
                    passes[f"{accuracy} {rows} {mode}"] = _pass_times(proposers.device_head, rows)
    lines: list[list[str]] = []
    for (accuracy, rows), modes in found.items():
        same = answers[accuracy, rows]
        held = {mode: answer == same[options.modes[0]] for mode, answer in same.items()}
        made = lines_of(Case(rows, 0, options.prompt, options.output), modes, held)
        lines += [[str(accuracy), *line[1:], passes.get(f"{accuracy} {line[1]} {line[2]}", "")] for line in made]
    titles = ["accuracy", *TITLES[1:], "pass ms"]
    print(f"# {describe()}\n\n{options.model}, {opening.precision}\n\n{markdown(titles, lines)}")
    return 0


def _pass_times(head: DeviceHeadDrafts, rows: int) -> str:
    first_s, later_s = (costs.seconds_if_known(rows) for costs in (head.first_costs, head.later_costs))
    return f"{1e3 * first_s:.2f}, {1e3 * later_s:.2f}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
