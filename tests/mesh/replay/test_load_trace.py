"""Files and folders of traces: read whole, or an error that names the file."""

import shutil
from pathlib import Path

import pytest

from mesh.replay.trace import TraceError
from mesh.replay.trace_formats import FORMATS, load_trace

DATA = Path("tests/data")


def test_a_file_error_names_the_file(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    with pytest.raises(TraceError, match=r"empty\.jsonl: holds no request"):
        load_trace(empty, "mooncake")
    with pytest.raises(TraceError, match=r"can't read trace .*missing"):
        load_trace(tmp_path / "missing", "mooncake")
    with pytest.raises(TraceError, match="unknown trace format 'azur': use one of mooncake"):
        load_trace(empty, "azur")


def test_a_folder_is_its_files_together_in_order_of_time(tmp_path: Path) -> None:
    folder = load_trace(DATA / "lmcache" / "taubench", "lmcache")
    files = sorted((DATA / "lmcache" / "taubench").glob("*.jsonl"))
    alone = [load_trace(file, "lmcache") for file in files]
    assert len(folder.requests) == sum(len(trace.requests) for trace in alone)
    times = [request.at_s for request in folder.requests]
    assert times == sorted(times)
    assert {request.session for request in folder.requests} == {file.stem for file in files}


def test_a_folder_without_traces_is_refused(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("no trace")
    with pytest.raises(TraceError, match=r"holds 0 \.jsonl or \.csv files"):
        load_trace(tmp_path, "azure")


def test_a_damaged_file_of_a_folder_is_named(tmp_path: Path) -> None:
    for file in (DATA / "lmcache" / "taubench").glob("*.jsonl"):
        shutil.copy(file, tmp_path)
    (tmp_path / "zz.jsonl").write_text("{")
    with pytest.raises(TraceError, match=r"zz\.jsonl: line 1: not a JSON object"):
        load_trace(tmp_path, "lmcache")


@pytest.mark.parametrize("name", FORMATS)
def test_another_formats_file_is_an_error_and_not_a_crash(name: str) -> None:
    others = {
        "mooncake": DATA / "azure" / "conv_first60.csv",
        "azure": DATA / "lmcache" / "taubench",
        "lmcache": DATA / "mooncake" / "conversation_first60.jsonl",
    }
    with pytest.raises(TraceError, match="line 1"):
        load_trace(others[name], name)
