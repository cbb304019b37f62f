"""The Lua library and the Python declarations match."""

from __future__ import annotations

import inspect
import re
from graphlib import CycleError
from pathlib import Path

import msgspec
import pytest

from roq import AsyncScheduler, RunConfig, Scheduler
from roq.admin.importable import STATE
from roq.client.lanes import LANES
from roq.client.operations import Operations, config_fields
from roq.client.operations.commands import REASON_CHARACTERS
from roq.client.operations.trainer import METRICS_BYTES
from roq.errors import CODES, Refused
from roq.protocol import functions, keys, library
from roq.protocol.snapshot import AGES, SPAN
from roq.types import RefusalReason

LUA = Path(__file__).parents[2] / "lua"
FUNCTIONS = {f.name: f for f in functions.FUNCTIONS}
FILES = sorted((LUA / "functions").glob("*.lua"))


def arguments_of(text: str) -> list[str]:
    """``name:kind`` of every argument that a Lua file declares."""
    declared = re.search(r"arguments = \{(.*?)\}", text, re.DOTALL)
    assert declared
    return re.findall(r'"([^"]+)"', declared[1])


def test_one_file_for_each_function() -> None:
    assert {path.stem for path in FILES} == FUNCTIONS.keys()


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_what_runs_once_takes_a_request_and_what_reads_says_so(path: Path) -> None:
    text = path.read_text()
    function = FUNCTIONS[path.stem]
    assert (arguments_of(text)[:1] == ["request:text"]) == function.once
    assert ("reads = true" in text) == function.reads


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_headers_name_every_argument_and_refusal(path: Path) -> None:
    text = path.read_text()
    header = re.match(r"--\[\[\n(roq_\w+): (.*?)\]\]", text, re.DOTALL)
    assert header
    assert header[1] == f"roq_{path.stem}"
    listed = re.search(r"Arguments:(.*?)\nReply", header[2], re.DOTALL)
    assert listed, "the header lists arguments and reply"
    for argument in arguments_of(text):
        if argument == "request:text":
            continue
        assert re.search(rf"\b{argument.split(':')[0]}\b", listed[1]), argument
    for code in set(re.findall(r"ROQ_\w+", header[2])):
        assert code in CODES
    for code in set(re.findall(r'refuse\.with\(\s*"(\w+)"', text)) - {"INVALID"}:
        assert f"ROQ_{code}" in header[2], f"{code} is missing from the header"


REFUSING = {
    r"groups\.read\(run, args": {"FENCED", "NO_GROUP"},
    r"claims\.(claimed|running)\(": {"FENCED"},
    r"claims\.(check_size|keep_prefix)\(": {"INVALID"},
    r"trainers\.attach\(": {"FENCED"},
    r"trainers\.require\(": {"FENCED", "NOT_READY"},
}


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_headers_name_the_refusals_of_what_they_call(path: Path) -> None:
    header, _, body = path.read_text().partition("]]")
    expected = {code for call, codes in REFUSING.items() if re.search(call, body) for code in codes}
    assert {f"ROQ_{code}" for code in expected} <= set(re.findall(r"ROQ_\w+", header))


def test_no_helper_is_unused() -> None:
    """luacheck sees locals only."""
    text = "\n".join(path.read_text() for path in LUA.rglob("*.lua"))
    for path in (LUA / "lib").glob("*.lua"):
        for name in re.findall(r"^function M\.(\w+)", path.read_text(), re.MULTILINE):
            assert re.search(rf"(?<!function )\b(M|{path.stem})\.{name}\b", text), f"{path.stem}.{name}"


def test_error_codes() -> None:
    listed = re.search(r"local codes = \{(.*?)\n\}", (LUA / "lib/refuse.lua").read_text(), re.DOTALL)
    assert listed
    assert {f"ROQ_{code}" for code in re.findall(r"(\w+) = true", listed[1])} == CODES.keys()
    assert {cls.code for cls in Refused.__subclasses__()} == CODES.keys()


def number(file: str, name: str) -> int:
    found = re.search(rf"^local {name} = (\d+)", (LUA / file).read_text(), re.MULTILINE)
    assert found
    return int(found[1])


def test_limits_that_client_and_library_share() -> None:
    # the client uses half of its lanes for single calls and half for a batch of calls
    assert number("lib/replies.lua", "LANES") == 2 * LANES
    assert number("functions/publish.lua", "MOST_METRICS") == METRICS_BYTES
    assert number("lib/arguments.lua", "MOST_TEXT") >= 4 * REASON_CHARACTERS  # in UTF-8


def test_keys() -> None:
    listed = re.search(r"M\.names = \{(.*?)\n\}", (LUA / "lib/context.lua").read_text(), re.DOTALL)
    assert listed
    assert tuple(re.findall(r'^  "(\w+)",', listed[1], re.MULTILINE)) == keys.NAMES
    assert dict(re.findall(r'^  "(\w+)", -- (\w+)', listed[1], re.MULTILINE)) == keys.KINDS


def test_refusal_reasons() -> None:
    text = (LUA / "functions/reserve.lua").read_text()
    said = set(re.findall(r'(?:return|refused =) "(\w+)"', text))
    assert said == set(RefusalReason.__args__)


PUBLIC = sorted(name for name in dir(Scheduler) if not name.startswith("_"))


@pytest.mark.parametrize("name", [n for n in PUBLIC if n != "close"])
def test_both_clients_take_and_give_the_same(name: str) -> None:
    blocking, awaited = getattr(Scheduler, name), getattr(AsyncScheduler, name)
    assert inspect.iscoroutinefunction(awaited)
    assert inspect.signature(blocking) == inspect.signature(awaited)
    assert awaited.__doc__ == blocking.__doc__
    assert blocking.__doc__


def test_both_clients_have_the_same_methods() -> None:
    awaited = {name for name in dir(AsyncScheduler) if not name.startswith("_")}
    assert awaited == {*PUBLIC, "aclose"} - {"close"}


@pytest.mark.parametrize("name", sorted(FUNCTIONS.keys() - {"version"}))
def test_a_transition_has_one_name_from_the_lua_to_the_test(name: str) -> None:
    """``version`` is the drivers' own: it is asked for before the first call."""
    assert hasattr(Operations, name)
    assert name in PUBLIC
    folders = (Path(__file__).parent, Path(__file__).parents[1] / "client")
    tests = [path.read_text() for folder in folders for path in folder.glob("test_*.py")]
    assert any(f".{name}(" in text for text in tests)


def test_lua_functions_stay_small() -> None:
    for path in LUA.rglob("*.lua"):
        assert len(path.read_text().splitlines()) <= 330, path


def test_a_new_runs_state_is_what_an_import_asks_for() -> None:
    listed = re.search(r"local initial = \{(.*?)\n\}", (LUA / "functions/create.lua").read_text(), re.DOTALL)
    assert listed
    assert {*re.findall(r"(\w+) =", listed[1]), "created"} == set(STATE)


def test_luacheck_knows_every_helper_file() -> None:
    """The client makes each a local of the library; luacheck sees one file at a time."""
    listed = (LUA.parent / ".luacheckrc").read_text().partition("each file of lua/lib is a local")[2]
    names = set(re.findall(r'"(\w+)"', listed)) - {"LIBRARY_VERSION", "LIBRARY_REVISION"}
    assert names == {path.stem for path in (LUA / "lib").glob("*.lua")}


def test_helper_files_do_not_use_each_other_in_circles() -> None:
    with pytest.raises(CycleError):
        library.load_order({"one": "two.run()", "two": "-- three.run()\none.run()", "three": ""})
    order = library.load_order({"one": "two.run()", "two": "-- one.run()\nrun.key.one", "three": "one.run()"})
    assert order == ["two", "one", "three"]


def test_the_settings_that_lua_reads_are_those_of_a_run() -> None:
    """A field missing in the Lua would read as nil there."""
    config = RunConfig(eta=1, batch_size=1, prompts=1, total_steps=1, stuck_timeout_s=1.0, max_inflight=1)
    every = msgspec.structs.replace(config, max_payload_bytes=1, post_process="module:function")
    assert set(lua_list("config_fields")) == config_fields(every).keys()


def test_the_state_that_lua_reads_is_what_it_writes() -> None:
    """Created with the run, or set by a transition (``context.set``, ``add``, ``next``)."""
    text = "\n".join(path.read_text() for path in LUA.rglob("*.lua"))
    created = set(STATE) - {"created"}
    changed = set(re.findall(r'context\.(?:set|add|next)\(run, "(\w+)"', text))
    apart = {"trainer", "former_trainers", "last_failure"}  # text, read where it is needed
    assert set(lua_list("state_fields")) == (created | changed) - apart


def lua_list(name: str) -> list[str]:
    listed = re.search(rf"local {name} = \{{(.*?)\n\}}", (LUA / "lib/context.lua").read_text(), re.DOTALL)
    assert listed
    return re.findall(r'"(\w+)"', listed[1])


def test_places_are_packed_alike() -> None:
    source = (LUA / "lib/slots.lua").read_text()
    packed = {
        name: int(number) for name, number in re.findall(r"^local (SPAN|AGES) = (\d+)", source, re.MULTILINE)
    }
    assert packed == {"SPAN": SPAN, "AGES": AGES}


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_every_function_names_its_roles(name: str) -> None:
    """``owner`` may call all of them, so one without a role of its own would go unnoticed."""
    roles = FUNCTIONS[name].roles
    assert roles
    assert set(roles) <= set(functions.ROLES)
