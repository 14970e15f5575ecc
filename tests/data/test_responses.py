"""The response file: nothing acknowledged is lost, nothing is done twice."""

import pytest

from drafttrain.data.errors import DataError
from drafttrain.data.responses import ResponseLog

SETTINGS = {"target": "m", "temperature": 0.0}


def write(path, *records):
    with ResponseLog(path, SETTINGS) as log:
        for record in records:
            log.append(record)


def test_responses_and_tombstones_are_both_done(tmp_path):
    """(fault kinds 16, 17)"""
    path = tmp_path / "out" / "responses.jsonl"
    write(path, {"id": "a", "response_ids": [1]}, {"id": "b", "discarded": "empty_response"})
    with ResponseLog(path, SETTINGS) as log:
        assert log.done == {"a", "b"}
        assert log.responses == 1


def test_every_possible_cut_of_the_last_line_is_removed_and_redone(tmp_path):
    """(fault kind 16)"""
    path = tmp_path / "responses.jsonl"
    write(path, {"id": "a", "x": "é"}, {"id": "b", "x": "é"})
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for length in range(first, len(whole)):
        path.write_bytes(whole[:length])
        with ResponseLog(path, SETTINGS) as log:
            assert log.done == {"a"}
            log.append({"id": "b", "x": "é"})
        assert path.read_bytes() == whole


def test_blank_lines_are_no_obstacle(tmp_path):
    """(fault kind 16)"""
    path = tmp_path / "responses.jsonl"
    write(path, {"id": "a"})
    path.write_bytes(b"\n" + path.read_bytes() + b"  \n\n")
    write(path, {"id": "b"})
    with ResponseLog(path, SETTINGS) as log:
        assert log.done == {"a", "b"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{broken}\n", "line 2 is not a response"),
        (b"[1]\n", "line 2 is not a response"),
        (b'{"no": "id"}\n', "line 2 is not a response"),
        (b'{"id": "a"}\n', "line 2 repeats id 'a'"),
    ],
)
def test_damaged_line_is_named_and_nothing_is_removed(tmp_path, line, message):
    path = tmp_path / "responses.jsonl"
    write(path, {"id": "a"})
    path.write_bytes(path.read_bytes() + line + b'{"id": "z"}\n')
    before = path.read_bytes()
    with pytest.raises(DataError, match=message), ResponseLog(path, SETTINGS):
        pass
    assert path.read_bytes() == before


def test_other_settings_are_refused(tmp_path):
    path = tmp_path / "responses.jsonl"
    write(path, {"id": "a"})
    with (
        pytest.raises(DataError, match=r"made with temperature = 0\.0, now it is 1\.0"),
        ResponseLog(path, {**SETTINGS, "temperature": 1.0}),
    ):
        pass


def test_file_without_settings_is_not_appended_to(tmp_path):
    path = tmp_path / "responses.jsonl"
    path.write_text('{"id": "a"}\n')
    with pytest.raises(DataError, match="choose another output"), ResponseLog(path, SETTINGS):
        pass


def test_second_writer_is_refused(tmp_path):
    path = tmp_path / "responses.jsonl"
    with (
        ResponseLog(path, SETTINGS),
        pytest.raises(DataError, match="written by another process"),
        ResponseLog(path, SETTINGS),
    ):
        pass
    write(path, {"id": "a"})
