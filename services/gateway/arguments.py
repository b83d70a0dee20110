"""Arguments that are not obeyed: which of them are refused, which are ignored and named in a warning. Pure.

An argument that would change the answer is refused by name, unless its value asks for nothing (`tools: []`). One that changes
nothing but speed, storage or bookkeeping is ignored, and so is one that no known API has; the answer's warning names both.
With `strict`, all of them are refused. See docs/decisions/0019-unknown-arguments.md.

The tables hold what OpenAI, vLLM, SGLang, llama.cpp, Ollama, OpenRouter and LiteLLM document for these endpoints.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping
from typing import Any

import msgspec

from common.protocol.errors import InvalidParameter

_MAX_NAME_CHARS = 64
_MAX_NAMED = 16
_MAX_NEUTRAL_BYTES = 64
_LIKENESS = 0.75
UNKNOWN = "unknown"
"""What the counter of ignored arguments calls those that no table knows: a client's words are no labels."""

ANY: Any = object()
"""As a neutral value: every value asks for nothing."""

Table = dict[str, tuple[Any, ...]]
"""Name → the values besides null that ask for nothing."""

REFUSED: Table = {
    # OpenAI
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "reasoning_effort": ("none",),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),  # of a completion
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
    # vLLM
    "add_special_tokens": (False,),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "chat_template": ("",),
    "continue_final_message": (False,),
    "detokenize": (True,),
    "documents": ([],),
    "echo": (False,),
    "guided_choice": ([],),
    "guided_grammar": ("",),
    "guided_json": (),
    "guided_regex": ("",),
    "include_reasoning": (True,),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "prompt_embeds": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "structural_tag": (),
    "thinking_token_budget": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    # SGLang
    "custom_logit_processor": (),
    "custom_params": ({},),
    "ebnf": ("",),
    "input_embeds": (),
    "json_schema": (),
    "lora_path": ("",),
    "no_stop_trim": (False,),
    "regex": ("",),
    "return_hidden_states": (False,),
    "session_params": ({},),
    "stop_regex": ("", []),
    # llama.cpp and the programs around it
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "grammar": ("",),
    "mirostat": (0,),
    "mirostat_mode": (0,),
    "n_keep": (0,),
    "n_predict": (),
    "repeat_penalty": (1,),
    "samplers": ([],),
    "smoothing_factor": (0,),
    "tfs": (1,),
    "tfs_z": (1,),
    "top_a": (0,),
    "top_n_sigma": (-1, 0),
    "typical": (1,),
    "typical_p": (1,),
    "xtc_probability": (0,),
    # Ollama, OpenRouter and others
    "do_sample": (True,),
    "enable_thinking": (),
    "format": ("",),
    "options": ({},),
    "plugins": ([],),
    "prompt_template": ("",),
    "reasoning": ({},),
    "system": ("",),
    "template": ("",),
    "think": (False,),
    "thinking": ({"type": "disabled"},),
    "thinking_budget": (),
    "transforms": ([],),
}

IGNORED: Table = {
    # OpenAI
    "metadata": ({},),
    "parallel_tool_calls": (ANY,),  # says nothing without tools
    "prompt_cache_key": ("",),
    "prompt_cache_options": ({},),
    "prompt_cache_retention": (),
    "safety_identifier": ("",),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "user": ("",),
    # vLLM
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "kv_transfer_params": ({},),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "request_id": ("",),
    "spaces_between_special_tokens": (True,),  # for tokenizers written in Python
    # SGLang
    "bootstrap_host": (),
    "bootstrap_port": (),
    "bootstrap_room": (),
    "data_parallel_rank": (),
    "return_cached_tokens_details": (False,),
    "rid": ("",),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    # llama.cpp and the programs around it
    "cache_prompt": (True,),
    "dry_allowed_length": (ANY,),  # without dry_multiplier, they say nothing
    "dry_base": (ANY,),
    "dry_penalty_last_n": (ANY,),
    "dry_sequence_breakers": (ANY,),
    "dynatemp_exponent": (ANY,),
    "id_slot": (-1,),
    "min_keep": (0,),
    "mirostat_eta": (ANY,),
    "mirostat_tau": (ANY,),
    "penalty_last_n": (ANY,),
    "repeat_last_n": (ANY,),
    "slot_id": (-1,),
    "timings_per_token": (False,),
    "xtc_threshold": (ANY,),
    # Ollama, OpenRouter, LiteLLM and others
    "cache_control": (),
    "chat_id": (),
    "extra_body": ({},),
    "extra_headers": ({},),
    "keep_alive": (),
    "models": ([],),
    "nvext": ({},),
    "provider": ({},),
    "route": (),
    "session_id": (),
    "usage": ({},),
    "include_obfuscation": (False,),  # in stream_options: padding against traffic analysis
}

MESSAGE_REFUSED: Table = {
    "audio": (),
    "function_call": ({},),
    "images": ([],),
    "partial": (False,),
}
MESSAGE_IGNORED: Table = {
    "annotations": ([],),
    "cache_control": (),
    "id": (),
    "provider_specific_fields": ({}, {"refusal": None}),
    "reasoning_details": ([],),
    "refusal": ("",),
    "status": (),
    "thinking_blocks": ([],),
    "timestamp": (),
    "type": ("message",),
}
PART_REFUSED: Table = dict.fromkeys(("audio_url", "file", "image", "image_url", "input_audio", "video", "video_url"), ())
PART_IGNORED: Table = {"annotations": ([],), "cache_control": (), "id": (), "index": (), "logprobs": ([],)}

_HINTS = {
    "chat_template": "name one of the model's own, or leave it out",
    "do_sample": "send temperature: 0 for greedy decoding",
    "enable_thinking": "send it in chat_template_kwargs",
    "format": "send response_format",
    "guided_choice": "send structured_outputs: {choice: …}",
    "guided_grammar": "send structured_outputs: {grammar: …}",
    "guided_json": "send structured_outputs: {json: …}",
    "guided_regex": "send structured_outputs: {regex: …}",
    "json_schema": "send response_format",
    "n_predict": "send max_tokens",
    "partial": "send prefix: true",
    "regex": "send structured_outputs: {regex: …}",
    "repeat_penalty": "send repetition_penalty",
    "thinking": "send what the model's template knows in chat_template_kwargs",
}


class Scope(msgspec.Struct, frozen=True):
    """An object of a body: what is obeyed in it, and how the rest is judged. `where` is put before names in warnings.
    `refusal`: an error's text for what is refused in it, where the object as a whole can't be served. `hints`: what to send
    instead of what is refused."""

    obeyed: Collection[str]
    refused: Table
    ignored: Table
    where: str = ""
    refusal: str = ""
    hints: Mapping[str, str] = {}


class Notes:
    """What one request sent in vain. `labels` are for the counter, `text` is for the client. `term`: what the request's API
    calls an argument of a chat."""

    def __init__(self, *, strict: bool = False) -> None:
        self.strict = strict
        self.labels: list[str] = []
        self.term: Callable[[str], str] = str
        self._named: dict[str, str] = {}

    @property
    def text(self) -> str:
        """One line of ASCII, empty if there is nothing to tell."""
        if not self._named:
            return ""
        names = [name + hint for name, hint in list(self._named.items())[:_MAX_NAMED]]
        more = len(self._named) - len(names)
        return "ignored: " + ", ".join(names) + (f" and {more} more" if more else "")

    def judge(self, scope: Scope, name: str, raw: bytes | memoryview, *, place: str = "") -> None:
        """Note or refuse an argument that `scope` does not obey. Of `raw`, its JSON, the first 65 bytes are enough.

        `place`: where the object is, for the error's `param`, for example `messages[3]`.

        :raises InvalidParameter: if it would change the answer, or `strict` is set.
        """
        shown = _printable(name)
        param = f"{place}.{shown}" if place else shown
        if name in scope.refused:
            if _asks_for_nothing(raw, scope.refused[name]):
                return
            if place and name == "function_call":
                raise InvalidParameter("functions are not supported yet: send tools and tool_calls", param=place)
            if scope.refusal:
                raise InvalidParameter(scope.refusal.format(shown), param=place)
            hint = scope.hints.get(name) or _HINTS.get(name, "leave it out")
            raise InvalidParameter(f"{param} is not supported yet: {hint}", param=param)
        hint, label = "", scope.where + shown
        if name in scope.ignored:
            if _asks_for_nothing(raw, scope.ignored[name]):
                return
            complaint = f"{param} has no effect here: leave it out"
        elif _asks_for_nothing(raw, ()):
            return
        else:
            hint, label = self._nearest(scope, name), UNKNOWN
            complaint = f"unknown argument {shown!r}" + (f": {hint}" if hint else "")
        if self.strict:
            raise InvalidParameter(complaint, param=param)
        if scope.where + shown not in self._named:
            self._named[scope.where + shown] = f" ({hint})" if hint else ""
            self.labels.append(label)

    def note(self, name: str, hint: str) -> None:
        """Name an argument of a known kind that has no effect in this request, and why (`hint`).

        :raises InvalidParameter: if `strict` is set.
        """
        name = self.term(name)
        if self.strict:
            raise InvalidParameter(f"{name} has no effect here: {hint}", param=name)
        self._named[name] = f" ({hint})"
        self.labels.append(name)

    def _nearest(self, scope: Scope, name: str) -> str:
        """Looking for it takes up to 0.1 ms, so only those that will be named are looked at."""
        if len(self._named) >= _MAX_NAMED or scope.where + _printable(name) in self._named:
            return ""
        near = difflib.get_close_matches(name[:_MAX_NAME_CHARS], scope.obeyed, n=1, cutoff=_LIKENESS)
        return f"did you mean {near[0]}?" if near else ""


def _asks_for_nothing(raw: bytes | memoryview, neutral: tuple[Any, ...]) -> bool:
    if neutral and neutral[0] is ANY:
        return True
    if len(raw) > _MAX_NEUTRAL_BYTES:
        return False
    if bytes(raw).strip() == b"null":
        return True
    try:
        return bool(neutral) and msgspec.json.decode(raw) in neutral
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidParameter("the body is not valid JSON") from error


def _printable(name: str) -> str:
    """A name as it may stand in a header: short, and without anything that ends one."""
    return "".join(c if c.isascii() and (c.isalnum() or c in "_-.$") else "?" for c in name[:_MAX_NAME_CHARS])
