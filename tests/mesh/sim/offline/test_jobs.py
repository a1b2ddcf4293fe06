"""Batch jobs of the simulator: how they are written, made and read."""

import json
from pathlib import Path

import pytest

from mesh.sim.offline.jobs import (
    LINES_MAX,
    OfflineInvalid,
    OfflineSpec,
    make_job,
    parse_offline,
    read_batch_file,
)
from mesh.sim.workload import keys_of
from tests.mesh.sim.build import EU, US


def line(custom_id="a", text="hello", **body):
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": "m", "messages": [{"role": "user", "content": text}], **body},
    }


def written(path, *lines):
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return path


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("5", OfflineSpec(region=None, source=5)),
        ("eu=5", OfflineSpec(region=EU, source=5)),
        ("eu=5,window=2h,at=1.5", OfflineSpec(region=EU, source=5, window=7200.0, at=1.5)),
        ("5,window=90", OfflineSpec(region=None, source=5, window=90.0)),
        ("5,prompt=9,answer=2", OfflineSpec(region=None, source=5, prompt=9, answer=2)),
        ("5,shared=90,groups=7", OfflineSpec(region=None, source=5, shared=90, groups=7)),
        ("us=a/b.jsonl", OfflineSpec(region=US, source=Path("a/b.jsonl"))),
        (f"{LINES_MAX}", OfflineSpec(region=None, source=LINES_MAX)),
    ],
)
def test_a_job_is_written_in_one_option(text, spec):
    assert parse_offline(text) == spec


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "write a file or a number of lines"),
        ("us=", "write a file or a number of lines"),
        ("0", "1 to 50000 lines"),
        (f"{LINES_MAX + 1}", "1 to 50000 lines"),
        ("US!=5", "region name"),
        ("5,prompt=0", "from 1 to"),
        ("5,prompt=x", "from 1 to"),
        ("5,prompt=1,prompt=2", "each once"),
        ("5,colour=2", "is none of prompt, answer"),
        ("5,window=0", "more than 0"),
        ("5,window=3x", "like 24h"),
        ("5,at=-1", "write seconds"),
        ("5,prompt=10,shared=10", "give fewer"),
        ("a.jsonl,prompt=10", "not for a file"),
    ],
)
def test_what_is_no_job_says_what_to_write(text, says):
    with pytest.raises(OfflineInvalid, match=says):
        parse_offline(text)


def test_made_lines_share_beginnings_and_nothing_else():
    spec = parse_offline("us=200,prompt=1000,shared=640,groups=4")
    job = make_job(spec, 1, (US, EU), seed=3)
    firsts = {node.prompt[0] for node in job.lines}
    assert len(firsts) == 4
    assert {part.tokens for part in firsts} == {640}
    assert len({keys_of(node).blocks[-1] for node in job.lines}) == 200
    mean = sum(node.prompt_tokens for node in job.lines) / 200
    assert 900 < mean < 1100
    assert make_job(spec, 1, (US, EU), seed=3) == job
    assert make_job(spec, 2, (US, EU), seed=3).lines != job.lines


def test_a_job_without_region_belongs_to_the_first():
    assert make_job(parse_offline("1"), 1, (EU, US), seed=0).region == EU
    with pytest.raises(OfflineInvalid, match="none of eu"):
        make_job(parse_offline("us=1"), 1, (EU,), seed=0)


def test_a_batch_file_is_read_as_a_batch_runner_reads_it(tmp_path):
    long = "x" * 4000
    path = written(
        tmp_path / "a.jsonl",
        line("a", long + "1", max_tokens=7),
        line("b", long + "2", max_completion_tokens=9),
        line("c"),
    )
    by_answer = {node.answer.tokens: node for node in read_batch_file(path)}
    assert by_answer.keys() == {7, 9, 256}
    assert by_answer[7].prompt_tokens == pytest.approx(1000, abs=5)
    shared = keys_of(by_answer[7]).hashes, keys_of(by_answer[9]).hashes
    assert shared[0] == shared[1] != ()


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([], "empty|no lines"),
        ([line("a"), line("a")], "line 2.*custom_id"),
        ([line("a"), {**line("b"), "method": "GET"}], "line 2.*POST"),
        ([line("a", max_tokens=0)], "line 1.*max_tokens"),
        ([line("a"), [1]], "line 2.*JSON object"),
    ],
)
def test_a_bad_line_is_named(tmp_path, lines, says):
    with pytest.raises(OfflineInvalid, match=says):
        read_batch_file(written(tmp_path / "a.jsonl", *lines))


def test_a_file_of_embeddings_is_not_played(tmp_path):
    embedding = {"custom_id": "a", "method": "POST", "url": "/v1/embeddings"}
    path = written(tmp_path / "job.jsonl", embedding | {"body": {"model": "m", "input": "hello"}})
    with pytest.raises(OfflineInvalid, match="/v1/embeddings"):
        read_batch_file(path)
