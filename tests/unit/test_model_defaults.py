"""What a model brings besides its weights: recommended sampling, named templates and every special token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from common.models.source import ModelFiles
from common.protocol.errors import ConfigError, InvalidParameter
from common.text.bundle import TextBundle, load_bundle
from common.text.generation_config import SamplingDefaults, load_sampling_defaults
from common.text.special_tokens import names_in_folder

USER = {"role": "user", "content": "hi"}


def folder(path: Path, **files: Any) -> ModelFiles:
    """A model's folder with a byte-level tokenizer, and these files: JSON, or text for `.jinja`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>", "<img>"])
    backend.save(str(path / "tokenizer.json"))
    for name, content in {"config.json": {"max_position_embeddings": 64}, **files}.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return ModelFiles(name="tiny", format="safetensors", path=path)


def gguf_file(path: Path, metadata: dict[str, Any]) -> ModelFiles:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    writer.add_token_list([*alphabet, "<s>", "</s>", "<pad>", "<mask>"])
    writer.add_token_types([*[1] * len(alphabet), 3, 3, 3, 3])
    writer.add_token_merges([])
    for name, offset in (("bos", 0), ("eos", 1), ("padding", 2), ("mask", 3)):
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", len(alphabet) + offset)
    for key, value in metadata.items():
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_int32}[type(value)]
        add(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return ModelFiles(name="tiny", format="gguf", path=path)


def text_of(bundle: TextBundle, ids: list[int]) -> str:
    return bundle.tokenizer.decode(ids, skip_special=False)


class TestSampling:
    @pytest.mark.parametrize(
        ("content", "expected"),
        [
            ({}, SamplingDefaults()),
            ({"temperature": 0.6, "top_k": 20, "top_p": 0.95}, SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95)),
            ({"min_p": 0.05, "repetition_penalty": 1.1}, SamplingDefaults(min_p=0.05, repetition_penalty=1.1)),
            ({"do_sample": True, "temperature": 0.7}, SamplingDefaults(temperature=0.7)),
            ({"do_sample": False, "temperature": 0.7, "top_p": 0.9}, SamplingDefaults(temperature=0.0, top_p=0.9)),
            ({"temperature": None, "top_k": 0}, SamplingDefaults(top_k=0)),
            ({"top_k": -1, "temperature": 1}, SamplingDefaults(top_k=0, temperature=1.0)),
            ({"eos_token_id": [1, 2], "max_new_tokens": 2048, "transformers_version": "4.51"}, SamplingDefaults()),
        ],
    )
    def test_of_a_folder(self, tmp_path: Path, content: dict[str, Any], expected: SamplingDefaults) -> None:
        files = folder(tmp_path, **{"generation_config.json": content})
        assert load_sampling_defaults(files) == expected
        assert load_bundle(files).sampling == expected
        assert load_bundle(files, generation_config=False).sampling == SamplingDefaults()

    def test_of_a_folder_without_the_file(self, tmp_path: Path) -> None:
        assert load_bundle(folder(tmp_path)).sampling == SamplingDefaults()

    def test_of_a_gguf_file(self, tmp_path: Path) -> None:
        keys = {"temp": 0.5, "top_k": 7, "top_p": 0.75, "min_p": 0.125, "penalty_repeat": 1.5}
        files = gguf_file(tmp_path / "m.gguf", {f"general.sampling.{name}": value for name, value in keys.items()})
        expected = SamplingDefaults(temperature=0.5, top_k=7, top_p=0.75, min_p=0.125, repetition_penalty=1.5)
        assert load_bundle(files).sampling == expected
        assert load_bundle(gguf_file(tmp_path / "n.gguf", {})).sampling == SamplingDefaults()

    @pytest.mark.parametrize(
        "content",
        [{"temperature": -1}, {"temperature": "hot" * 9999}, {"top_p": 7}, {"repetition_penalty": 0}, {"top_k": True}],
    )
    def test_what_can_not_be_sampled_with_is_named_at_the_start(self, tmp_path: Path, content: dict[str, Any]) -> None:
        files = folder(tmp_path, **{"generation_config.json": content})
        with pytest.raises(ConfigError, match=f"{next(iter(content))}.*--generation-config none") as caught:
            load_bundle(files)
        assert len(str(caught.value)) < 200
        load_bundle(files, generation_config=False)


class TestSpecialTokens:
    def test_of_a_folder(self, tmp_path: Path) -> None:
        source = (
            "{{ bos_token }}{{ eos_token }}{{ unk_token }}{{ sep_token }}{{ pad_token }}{{ image_token }}"
            "{{ additional_special_tokens | join('+') }}"
        )
        config = {
            "bos_token": {"content": "<s>", "lstrip": False},
            "eos_token": "</s>",
            "sep_token": "S",
            "additional_special_tokens": ["A", {"content": "B"}],
            "extra_special_tokens": {"image_token": "<img>"},
            "add_bos_token": True,
            "pad_token": None,
        }
        older = {"unk_token": "U", "pad_token": {"content": "P"}, "eos_token": "not this one"}
        files = folder(
            tmp_path,
            **{"tokenizer_config.json": config, "special_tokens_map.json": older, "chat_template.jinja": source},
        )
        bundle = load_bundle(files)
        assert text_of(bundle, bundle.encode_chat([USER])) == "<s></s>USP<img>A+B"
        assert "add_bos_token" not in names_in_folder(tmp_path)

    def test_of_a_gguf_file(self, tmp_path: Path) -> None:
        source = "{{ bos_token }}{{ pad_token }}{{ mask_token }}{{ eos_token }}"
        bundle = load_bundle(gguf_file(tmp_path / "m.gguf", {"tokenizer.chat_template": source}))
        assert text_of(bundle, bundle.encode_chat([USER])) == "<s><pad><mask></s>"


class TestNamedTemplates:
    def bundles(self, path: Path) -> list[TextBundle]:
        listed = [{"name": name, "template": text} for name, text in (("default", "D"), ("tool_use", "T"), ("bad", "{% if %}"))]
        (path / "a").mkdir()
        (path / "b").mkdir()
        return [
            load_bundle(folder(path / "a", **{"tokenizer_config.json": {"chat_template": listed}})),
            load_bundle(
                folder(
                    path / "b",
                    **{
                        "chat_template.jinja": "D",
                        "additional_chat_templates/tool_use.jinja": "T",
                        "additional_chat_templates/bad.jinja": "{% if %}",
                    },
                )
            ),
            load_bundle(
                gguf_file(
                    path / "m.gguf",
                    {
                        "tokenizer.chat_template": "D",
                        "tokenizer.chat_template.tool_use": "T",
                        "tokenizer.chat_template.bad": "{% if %}",
                    },
                )
            ),
        ]

    def test_they_are_found_wherever_they_stand(self, tmp_path: Path) -> None:
        for bundle in self.bundles(tmp_path):
            assert text_of(bundle, bundle.encode_chat([USER])) == "D"
            assert text_of(bundle, bundle.encode_chat([USER], template="default")) == "D"
            assert text_of(bundle, bundle.encode_chat([USER], template="tool_use")) == "T"
            assert set(bundle.named_templates) == {"tool_use"}, "one that can't be compiled is left out"
            with pytest.raises(InvalidParameter, match="tool_use") as caught:
                bundle.encode_chat([USER], template="{{ messages }}")
            assert caught.value.param == "chat_template"

    def test_without_a_default_one_must_be_named(self, tmp_path: Path) -> None:
        listed = [{"name": "rag", "template": "R"}]
        bundle = load_bundle(folder(tmp_path, **{"tokenizer_config.json": {"chat_template": listed}}))
        with pytest.raises(InvalidParameter, match="rag"):
            bundle.encode_chat([USER])
        assert text_of(bundle, bundle.encode_chat([USER], template="rag")) == "R"

    def test_half_a_character_in_a_file_is_one_error(self, tmp_path: Path) -> None:
        bundle = load_bundle(folder(tmp_path, **{"tokenizer_config.json": {"chat_template": "\U0001f600"}}))
        assert text_of(bundle, bundle.encode_chat([USER])) == "\U0001f600"
        for config in ({"chat_template": "\ud800"}, {"bos_token": "\udc00"}):
            with pytest.raises(ConfigError, match=r"tokenizer_config\.json can't be read: 'utf-8' codec can't encode"):
                load_bundle(folder(tmp_path, **{"tokenizer_config.json": config}))

    def test_a_broken_default_stops_the_start(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="compiled"):
            load_bundle(folder(tmp_path, **{"chat_template.jinja": "{% if %}"}))


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("{% for m in messages %}[{{ m.role }}]{% endfor %}", "[system][user]"),
        ("{% for m in messages %}[{% if m.role == 'developer' %}D{% else %}{{ m.role }}{% endif %}]{% endfor %}", "[D][user]"),
    ],
)
def test_a_developer_is_a_system_for_templates_that_know_none(tmp_path: Path, source: str, shown: str) -> None:
    bundle = load_bundle(folder(tmp_path, **{"chat_template.jinja": source}))
    messages = [{"role": "developer", "content": "be brief"}, USER]
    assert text_of(bundle, bundle.encode_chat(messages)) == shown
    assert messages[0]["role"] == "developer"
