"""Prompts: the same rows in the same order for every worker, and plain messages for broken input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from roq import ConfigError
from roq.config import Data
from roq.job.prompts import load_prompts
from roq.rewards import exact_match, load_function, reasoning_gym


def write(path: Path, rows: list[object]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture
def rows(tmp_path: Path) -> str:
    return write(
        tmp_path / "rows.jsonl", [{"prompt": f"{i}+1=", "answer": str(i + 1), "level": i} for i in range(7)]
    )


def test_rows_keep_their_fields_and_get_the_template(rows: str) -> None:
    prompts = load_prompts(Data(file=rows, template="Q: {prompt}\nA: {}", shuffle=False))
    assert len(prompts) == 7
    assert prompts.item(8, seed=0) == {
        "prompt": "Q: 1+1=\nA: {}",
        "question": "1+1=",
        "answer": "2",
        "level": 1,
    }


def test_every_epoch_is_a_permutation_of_its_own(rows: str) -> None:
    prompts = load_prompts(Data(file=rows))
    epochs = [[prompts.index(7 * epoch + i, seed=3) for i in range(7)] for epoch in range(4)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    # Work of an earlier epoch may still be under way: its order stays what it was.
    assert [prompts.index(i, seed=3) for i in range(7)] == epochs[0]
    assert [prompts.index(i, seed=4) for i in range(7)] != epochs[0]


def test_order_is_pinned(rows: str) -> None:
    # A run outlives a Python upgrade: this order may never change.
    prompts = load_prompts(Data(file=rows))
    assert [prompts.index(i, seed=0) for i in range(14)] == PINNED


PINNED = [1, 3, 6, 5, 4, 0, 2, 3, 6, 5, 4, 2, 1, 0]


def test_digest_sees_content_and_order(tmp_path: Path, rows: str) -> None:
    digest = load_prompts(Data(file=rows)).digest
    lines = Path(rows).read_text().splitlines()
    assert len(digest) == 64
    assert load_prompts(Data(file=rows)).digest == digest

    def of(changed: list[str]) -> str:
        path = tmp_path / "changed.jsonl"
        path.write_text("\n".join(changed))
        return load_prompts(Data(file=str(path))).digest

    assert of(lines) == digest
    assert of(lines[::-1]) != digest
    assert of(lines[:-1]) != digest
    assert of([lines[0].replace("level", "stage"), *lines[1:]]) != digest
    assert load_prompts(Data(file=rows, template="> {prompt}")).digest != digest


def test_parquet_equals_jsonl(tmp_path: Path, rows: str) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.Table.from_pylist([json.loads(line) for line in Path(rows).read_text().splitlines()])
    parquet.write_table(table, tmp_path / "rows.parquet")
    made = load_prompts(Data(file=str(tmp_path / "rows.parquet")))
    assert made.digest == load_prompts(Data(file=rows)).digest
    with pytest.raises(ConfigError, match=r"rows\.parquet: field 'promt' is missing \(it has 'prompt'\)"):
        load_prompts(Data(file=str(tmp_path / "rows.parquet"), prompt_field="promt"))
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and nothing else")
    with pytest.raises(ConfigError, match=r"broken\.parquet"):
        load_prompts(Data(file=str(tmp_path / "broken.parquet")))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a", "answer": ', r"bad\.jsonl, line 3"),
        ("[1, 2]", r"bad\.jsonl, line 3\b.*list"),
        ('{"prompt": "a"}', r"bad\.jsonl, line 3\b.*answer.*prompt"),
        ('{"prompt": "a", "answers": 1}', r"line 3\b.*'answer'.*'answers'"),
        ('{"prompt": "a", "answer": null}', r"line 3\b.*data\.answer_field"),
        ('{"prompt": 5, "answer": "b"}', r"line 3\b.*'prompt'.*5"),
        ('{"prompt": "\udcff"}', r"line 3"),
    ],
)
def test_broken_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    good = '{"prompt": "a", "answer": "b"}\n\n'
    path.write_bytes(good.encode() + line.encode("utf-8", "surrogateescape") + b"\n")
    with pytest.raises(ConfigError, match=message):
        load_prompts(Data(file=str(path)))


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.jsonl"):
        load_prompts(Data(file=str(tmp_path / "none.jsonl")))
    (tmp_path / "rows.csv").write_text("prompt,answer\n")
    with pytest.raises(ConfigError, match=r"\.jsonl.*\.parquet"):
        load_prompts(Data(file=str(tmp_path / "rows.csv")))
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match=r"empty\.jsonl"):
        load_prompts(Data(file=str(tmp_path / "empty.jsonl")))


def test_reasoning_gym_rows_and_their_real_scorer() -> None:
    pytest.importorskip("reasoning_gym")
    data = Data(dataset="basic_arithmetic", size=5, seed=7, settings={"max_digits": 1, "max_terms": 2})
    prompts = load_prompts(data)
    assert prompts.digest == load_prompts(data).digest
    assert prompts.digest != load_prompts(Data(dataset="basic_arithmetic", size=5, seed=8)).digest
    item = prompts.item(0, seed=0)
    assert {"prompt", "question", "answer", "metadata", "dataset", "settings", "row"} <= item.keys()
    assert reasoning_gym(item, f" {item['answer']}\n") == 1.0
    assert reasoning_gym(item, f"I think <answer>{item['answer']}</answer>.") == 1.0
    assert reasoning_gym(item, "no idea") < 0.5


def test_scorer_gets_the_run_s_settings() -> None:
    pytest.importorskip("reasoning_gym")
    settings = {"min_num_decimal_places": 2, "max_num_decimal_places": 2, "precision": 12}
    item = load_prompts(Data(dataset="decimal_arithmetic", size=3, settings=settings)).item(0, seed=0)
    near = str(round(float(item["answer"]), 8) + 5e-3)
    # Right to the two decimals of these settings; the defaults ask for more.
    assert reasoning_gym(item, near) == 1.0
    assert reasoning_gym(item | {"settings": {"size": 3, "seed": 0}}, near) < 1.0


def test_reasoning_gym_refusals() -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ConfigError, match=r"chain_sums.*'chain_sum'"):
        load_prompts(Data(dataset="chain_sums"))
    with pytest.raises(ConfigError, match="max_digitz"):
        load_prompts(Data(dataset="basic_arithmetic", settings={"max_digitz": 1}))
    with pytest.raises(ConfigError, match="exact_match"):
        reasoning_gym({"prompt": "a", "answer": "b"}, "b")


def test_exact_match() -> None:
    assert exact_match({"answer": 4}, " 4 ") == 1.0
    assert exact_match({"answer": "4"}, "<answer>5</answer> no, <answer>4</answer>") == 1.0
    assert exact_match({"answer": "4"}, "44") == 0.0


def test_load_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_function("roq.rewards:exact_match") is exact_match
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine_for_roq.py").write_text("def score(item, response):\n    return 0.5\n")
    assert load_function("mine_for_roq:score")({}, "") == 0.5
    with pytest.raises(ConfigError, match="skore"):
        load_function("mine_for_roq:skore")
    with pytest.raises(ConfigError, match=r"'nowhere' cannot be imported \(ModuleNotFoundError"):
        load_function("nowhere:score")
    with pytest.raises(ConfigError, match="module:function"):
        load_function("nowhere")
    (tmp_path / "fails_for_roq.py").write_text("1 / 0\n")
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        load_function("fails_for_roq:score")


def test_core_needs_no_engine() -> None:
    code = "import sys, roq.job.prompts, roq.rewards; print({'torch', 'numpy', 'vllm'} & sys.modules.keys())"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("depth", [64, 300, 900, 100_000])
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
def test_nested_prompts(tmp_path: Path, depth: int, opening: str, closing: str) -> None:
    inner = "0" if opening != "[" else ""
    (tmp_path / "p.jsonl").write_text(
        f'{{"prompt":"x","answer":{opening * depth}{inner}{closing * depth}}}\n'
    )
    with pytest.raises(ConfigError, match=r"p\.jsonl, line 1\b.*\b64\b"):
        load_prompts(Data(file=str(tmp_path / "p.jsonl")))


def test_what_is_nested_less_is_fine(tmp_path: Path) -> None:
    deep = "[" * 60 + "]" * 60
    (tmp_path / "p.jsonl").write_text(f'{{"prompt":"x","answer":{deep}}}\n')
    assert len(load_prompts(Data(file=str(tmp_path / "p.jsonl")))) == 1


@pytest.mark.parametrize(
    "line", [b"\xff\xfe", b"9" * 5000, b'{"prompt": 1e', b'"text"', b"\0", b'{"prompt":"\xed\xa0']
)
def test_lines_that_are_no_rows(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "p.jsonl").write_bytes(line + b"\n")
    with pytest.raises(ConfigError, match="line 1"):
        load_prompts(Data(file=str(tmp_path / "p.jsonl")))
