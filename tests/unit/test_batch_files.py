"""What batches are made of, without anything that runs: forms, lines, records and counts."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from common.protocol.errors import InvalidParameter, NoWorkers
from services.gateway.batches import results
from services.gateway.batches.lines import MAX_ERRORS, LineChecker, LineSplitter
from services.gateway.batches.multipart import FormParser, Part, boundary_of
from services.gateway.batches.progress import Progress
from services.gateway.batches.records import NEXT, Batch, parse_request

# -- forms

BOUNDARY = b"xYz"
FORM = (
    b'--xYz\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--xYz\r\ncontent-disposition: form-data; name="file"; filename="a b.jsonl"\r\nContent-Type: text/plain\r\n\r\n'
    b"one\r\n--xY\r\n\r\n--xYztwo".replace(b"--xYztwo", b"-xYz\ntwo")
    + b"\r\n"
    b'--xYz\r\nContent-Disposition: form-data; name="empty"\r\n\r\n\r\n'
    b"--xYz--\r\nwhatever"
)


def parsed(pieces: list[bytes]) -> list[tuple[str, str, bytes]]:
    parser = FormParser(BOUNDARY)
    found: list[tuple[str, str, bytes]] = []
    for piece in pieces:
        for event in parser.push(piece):
            if isinstance(event, Part):
                found.append((event.name, event.filename, b""))
            else:
                found[-1] = (*found[-1][:2], found[-1][2] + event)
    parser.finish()
    return found


def test_a_form_is_the_same_however_it_is_cut() -> None:
    whole = parsed([FORM])
    assert whole == [
        ("purpose", "", b"batch"),
        ("file", "a b.jsonl", b"one\r\n--xY\r\n\r\n-xYz\ntwo"),
        ("empty", "", b""),
    ]
    assert parsed([FORM[at : at + 1] for at in range(len(FORM))]) == whole
    dice = random.Random(1)
    for _ in range(50):
        cuts = sorted(dice.sample(range(len(FORM)), 6))
        assert parsed([FORM[a:b] for a, b in zip([0, *cuts], [*cuts, len(FORM)], strict=True)]) == whole


@pytest.mark.parametrize(
    "form",
    [
        b"",
        FORM[:-20],
        b"no boundary at all",
        b"--xYz\r\n\r\nno head\r\n--xYz--",
        b"--xYz\r\nContent-Disposition: attachment\r\n\r\nx\r\n--xYz--",
        b"--xYz\r\n" + b"x" * 10_000,
        b"".join(b'--xYz\r\nContent-Disposition: form-data; name="a"\r\n\r\n\r\n' for _ in range(40)) + b"--xYz--",
        b"--xYzgarbage\r\n\r\n",
    ],
)
def test_what_is_no_form_is_refused(form: bytes) -> None:
    with pytest.raises(InvalidParameter):
        parsed([form])


@pytest.mark.parametrize(
    "content_type",
    [
        b"",
        b"application/json",
        b"multipart/form-data",
        b"multipart/form-data; boundary=",
        b'multipart/form-data; boundary="\r"',
    ],
)
def test_what_has_no_boundary_is_refused(content_type: bytes) -> None:
    with pytest.raises(InvalidParameter):
        boundary_of(content_type)
    assert boundary_of(b'multipart/form-data; boundary="a b"') == b"a b"


# -- lines


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_lines_are_the_same_however_they_are_cut(mark: bytes) -> None:
    text = mark + b"one\r\n\n  two  \nthree and more\n\n" + b"x" * 500 + b"\nlast"
    for size in (1, 3, 7, 1000):
        splitter = LineSplitter(100)
        found = [line for at in range(0, len(text), size) for line in splitter.push(text[at : at + size])]
        found += splitter.finish()
        assert found == [b"one", b"two", b"three and more", b"x" * 101, b"last"]


def line(**changes: Any) -> bytes:
    whole = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "m"}, **changes}
    return json.dumps({name: value for name, value in whole.items() if value is not None}).encode()


def checked(*lines: bytes, max_lines: int = 1000) -> LineChecker:
    checker = LineChecker(
        "/v1/completions", choose=lambda name: name if name == "m" else None, max_lines=max_lines, max_line_bytes=1000
    )
    for raw in lines:
        if not checker.check(raw):
            break
    checker.finish()
    return checker


@pytest.mark.parametrize(
    ("raw", "code", "param"),
    [
        (b"[]", "invalid_request", None),
        (b"{", "invalid_json_line", None),
        (b'{"custom_id": "\xff"}', "invalid_json_line", None),
        (b'{"body": ' + b"[" * 900, "invalid_json_line", None),
        (line(custom_id=None), "missing_required_parameter", "custom_id"),
        (line(custom_id=5), "invalid_request", None),
        (line(custom_id="x" * 600), "invalid_request", "custom_id"),
        (line(method=None), "missing_required_parameter", "method"),
        (line(method="GET"), "invalid_method", "method"),
        (line(url=None), "missing_required_parameter", "url"),
        (line(url="/v1/chat/completions"), "invalid_url", "url"),
        (line(body=None), "missing_required_parameter", "body"),
        (line(body=[]), "invalid_request", "body"),
        (line(body={}), "model_not_found", "body.model"),
        (line(body={"model": "other"}), "model_not_found", "body.model"),
        (line(body={"model": "m", "prompt": "x" * 1000}), "line_too_long", None),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_wrong_with_a_line_is_said_with_its_number(raw: bytes, code: str, param: str | None) -> None:
    (error,) = checked(line(custom_id="fine"), raw).errors
    assert (error.code, error.line, error.param) == (code, 2, param)


def test_a_custom_id_names_one_line() -> None:
    (error,) = checked(line(custom_id="a"), line(custom_id="b"), line(custom_id="a")).errors
    assert (error.code, error.line) == ("duplicate_custom_id", 3)


def test_a_file_has_at_least_one_line_and_no_more_than_are_allowed() -> None:
    assert [error.code for error in checked().errors] == ["empty_file"]
    assert [error.code for error in checked(*(line(custom_id=str(n)) for n in range(5)), max_lines=3).errors] == [
        "too_many_tasks"
    ]


def test_not_more_errors_are_listed_than_anybody_reads() -> None:
    assert len(checked(*[b"{"] * (2 * MAX_ERRORS)).errors) == MAX_ERRORS


# -- records, results and counts


def batch(**fields: Any) -> Batch:
    return Batch(
        id="batch_1",
        endpoint="/v1/completions",
        input_file="file-1",
        completion_window="24h",
        created_at=1,
        expires_at=2,
        **fields,
    )


def test_a_batch_moves_along_its_states_and_no_other_way() -> None:
    moved = batch().moved("in_progress", 5.5).moved("finalizing", 6).moved("completed", 7)
    body = moved.body()
    assert (body["status"], body["in_progress_at"], body["finalizing_at"], body["completed_at"]) == ("completed", 5, 6, 7)
    assert body["cancelled_at"] is None and body["errors"] is None
    for status, following in NEXT.items():
        for other in NEXT:
            if other not in following:
                with pytest.raises(AssertionError):
                    batch(status=status).moved(other, 1)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input_file_id": None}, "input_file_id"),
        ({"input_file_id": "file-*"}, "input_file_id"),
        ({"endpoint": "/v1/images"}, "endpoint"),
        ({"completion_window": "30d"}, "completion_window"),
        ({"completion_window": "-1h"}, "completion_window"),
        ({"completion_window": 24}, "completion_window"),
        ({"metadata": {"a": "x" * 600}}, "metadata"),
        ({"metadata": {str(n): "x" for n in range(20)}}, "metadata"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"output_expires_after": {"seconds": 3600}}, "output_expires_after"),
    ],
)
def test_a_wrong_request_for_a_batch_names_its_argument(change: dict[str, Any], param: str) -> None:
    whole: dict[str, Any] = {"input_file_id": "file-1a", "endpoint": "/v1/completions", "completion_window": "24h"}
    assert parse_request(json.dumps(whole).encode())[1] == 24 * 3600
    body = {name: value for name, value in {**whole, **change}.items() if value is not None}
    with pytest.raises(InvalidParameter) as refused:
        parse_request(json.dumps(body).encode())
    assert refused.value.param == param
    with pytest.raises(InvalidParameter):
        parse_request(b"{")


def test_a_result_is_a_line_of_openais_output_file() -> None:
    done = json.loads(results.answered("é", "cmpl-1", b'{"text": "\\n"}').data)
    assert set(done) == {"id", "custom_id", "response", "error"} and done["error"] is None
    assert done["response"] == {"status_code": 200, "request_id": "cmpl-1", "body": {"text": "\n"}}
    failed = json.loads(results.refused("b", "cmpl-2", NoWorkers("none")).data)["response"]
    assert failed["status_code"] == 503 and failed["body"]["error"]["code"] == "no_workers"
    assert json.loads(results.not_run("c", "batch_expired").data)["error"]["code"] == "batch_expired"
    assert b"\n" not in results.answered("a\nb", "x", b"{}").data


def test_a_line_is_counted_once() -> None:
    progress = Progress(3)
    for number, sequence in ((1, 10), (1, 11), (0, 12), (7, 13), (-1, 14)):
        progress.add(number, sequence, completed=number == 1)
    assert (progress.completed, progress.failed, progress.sequence) == (1, 1, 14)
    assert not progress.is_whole and progress.has(1) and not progress.has(2) and not progress.has(9)
    progress.add(2, 15, completed=True)
    assert progress.is_whole
    told = progress.told(batch(total=3))
    assert (told.completed, told.failed) == (2, 1)
