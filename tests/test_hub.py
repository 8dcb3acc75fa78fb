"""Repositories of the hub: ids, the files that are fetched, and error texts.

The hub is ``hub_server``; huggingface_hub, which reads its variables when it is imported, runs in
processes of its own.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import huggingface_hub
import pytest

import eecore
import hub_server
import mtp_heads
from eecore.errors import ModelError
from eecore.files import hub
from eecore.models import load_model
from head_packs import write_pack
from hub_server import TOKEN, Hub
from servers import started
from tiny_gguf import write_gguf
from tiny_models import write_model

PROGRAM = """
import sys
from eecore.files import hub
from eecore.errors import ModelError
for said in sys.argv[2:]:
    try:
        print(getattr(hub, sys.argv[1])(said))
    except ModelError as error:
        print(f"{type(error).__name__}: {error}")
print(*(name for name in sys.modules if name in ("torch", "huggingface_hub")), file=sys.stderr)
"""
# Several commands in one process: the codes that they end with, and what they say.
COMMANDS = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from eecore.cli.app import run
said = []
for words in json.loads(sys.argv[1]):
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        code = run(words)
    said.append({"code": code, "stdout": out.getvalue(), "stderr": err.getvalue()})
print(json.dumps(said))
"""
DRAFTS = "org/ggufs:drafts.gguf"
"""A model with a layer that drafts."""
OFFLINE = {"HF_HUB_OFFLINE": "1"}


@pytest.fixture
def online() -> Iterator[Hub]:
    with hub_server.hub() as running:
        yield running


@pytest.fixture
def environment(online: Hub, tmp_path: Path) -> dict[str, str]:
    """The variables of a process that sees this hub alone, with a cache of the test's own."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return {
        **own,
        "HF_HOME": str(tmp_path / "cache"),
        "HF_ENDPOINT": online.endpoint,
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "OMP_NUM_THREADS": "1",
    }


Fetch = Callable[..., str]


@pytest.fixture
def fetch(environment: dict[str, str], tmp_path: Path) -> Fetch:
    """The results of a fresh process for ids: each a path, or an error with its class."""
    (tmp_path / "here").mkdir()

    def run(*said: str, function: str = "fetch_model", **variables: str) -> str:
        command = [sys.executable, "-c", PROGRAM, function, *said]
        ran = subprocess.run(
            command,
            env={**environment, **variables},
            cwd=tmp_path / "here",
            capture_output=True,
            text=True,
            check=True,
        )
        assert "torch" not in ran.stderr.split()
        return ran.stdout.strip()

    return run


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A model as in repositories, with many files that eecore does not read."""
    made = write_model(tmp_path / "model", num_shards=2)
    for name in ("pytorch_model.bin", "optimizer.pt", "README.md", "exits/old.pt"):
        (made / name).parent.mkdir(exist_ok=True)
        (made / name).write_bytes(b"a pickle")
    for name in ("consolidated.safetensors", "onnx/model.safetensors", "model.fp16.safetensors"):
        (made / name).parent.mkdir(exist_ok=True)
        (made / name).write_bytes(b"other weights")
    (made / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (made / "exits" / "head.json").write_text("{}")
    (made / "exits.json").write_text("{}")
    return made


def files_of(path: Path) -> set[str]:
    return {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}


# What is fetched


def test_a_directory_has_what_is_read_of_it_and_no_pickle(
    online: Hub, directory: Path, fetch: Fetch
) -> None:
    online.add("org/name", directory)
    fetched = Path(fetch("org/name"))
    assert files_of(fetched) == {
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "exits.json",
        "exits/head.json",
    } & files_of(directory)
    assert set(online.fetched) <= files_of(fetched)
    online.fetched.clear()
    assert fetch("org/name") == str(fetched)
    assert not online.fetched  # they lie in the cache


def test_shards_as_those_of_qwen35_are_called(online: Hub, directory: Path, fetch: Fetch) -> None:
    index = directory / "model.safetensors.index.json"
    text = index.read_text()
    shards = [f"model.safetensors-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for shard in shards:
        usual = shard.replace(".safetensors-", "-")
        (directory / usual).rename(directory / shard)
        text = text.replace(usual, shard)
    index.write_text(text)
    online.add("org/name", directory)
    fetched = Path(fetch("org/name"))
    assert files_of(fetched) >= {*shards, index.name}
    assert load_model(fetched, "cpu")[0] == load_model(directory, "cpu")[0]


def test_a_revision(online: Hub, tmp_path: Path, fetch: Fetch) -> None:
    new, old = write_model(tmp_path / "new"), write_model(tmp_path / "old", rope_theta=777.0)
    repository = online.add("org/name", new, old)
    config = Path(fetch("org/name@v1")) / "config.json"
    assert config.read_bytes() == (old / "config.json").read_bytes()
    commit = repository.commit("main")
    by_commit, by_name, said = fetch(f"org/name@{commit}", "org/name", "org/name@v9").splitlines()
    assert by_commit == by_name
    assert said.startswith("ModelNotFoundError: model: expected a branch, tag or commit of ")
    assert said.endswith(", got 'v9'")


def test_one_gguf_file_with_what_lies_beside_it(online: Hub, tmp_path: Path, fetch: Fetch) -> None:
    made = tmp_path / "ggufs"
    (made / "small").mkdir(parents=True)
    for name in ("big.gguf", "small/a[1].gguf", "small/a[1].exits.json", "README.md"):
        (made / name).write_text(name)
    online.add("org/name", made, made)
    asked = ("org/name:small/a[1].gguf", "org/name@v1:small/a[1].gguf", "org/name:big.gguf@v1")
    for said, path in zip(asked, fetch(*asked).splitlines(), strict=True):
        assert Path(path).read_text() in said
    assert set(online.fetched) == {"big.gguf", "small/a[1].gguf", "small/a[1].exits.json"}


def test_all_parts_of_a_gguf_file(online: Hub, tmp_path: Path, fetch: Fetch) -> None:
    made = tmp_path / "parts"
    made.mkdir()
    parts = [f"a-{number:05}-of-00003.gguf" for number in (1, 2, 3)]
    for name in (*parts, "b-00001-of-00003.gguf"):
        (made / name).write_text(name)
    online.add("org/name", made)
    assert files_of(Path(fetch(f"org/name:{parts[0]}")).parent) == set(parts)


def test_a_draft_head(online: Hub, tmp_path: Path, fetch: Fetch) -> None:
    head = tmp_path / "head"
    (head / "exits").mkdir(parents=True)
    for name in ("head.json", "head.safetensors", "head.bin"):
        (head / "exits" / name).write_text(name)
    online.add("org/head", head / "exits")
    online.add("org/model", head)
    online.add("org/none", write_model(tmp_path / "none"))
    alone = {"head.json", "head.safetensors"}
    asked = ("org/head", "org/model", "org/none")
    whole, inside, none = fetch(*asked, function="fetch_head").splitlines()
    assert files_of(Path(whole)) == alone
    assert Path(inside).name == "exits"
    assert files_of(Path(inside)) == alone
    assert "exits: expected a repository with head.json" in none


def test_a_model_is_at_hand_once_it_was_fetched(online: Hub, tmp_path: Path, fetch: Fetch) -> None:
    online.add("org/name", write_model(tmp_path / "made"))
    assert fetch("org/name", function="is_at_hand", **OFFLINE) == "False"
    fetch("org/name")
    assert fetch("org/name", function="is_at_hand", **OFFLINE) == "True"


# What is said where nothing can be fetched


def test_ids_that_do_not_exist(online: Hub, fetch: Fetch) -> None:
    said = fetch("org/nme")
    assert said.startswith("ModelNotFoundError: model: expected a path, or a repository of")
    assert f"of {online.endpoint}, got org/nme, which is neither" in said
    assert "HF_TOKEN" in said
    said = fetch("org/nme", function="fetch_head")
    assert said.startswith("ModelNotFoundError: exits: expected a path")


def test_what_needs_a_licence_accepted_or_a_token(
    online: Hub, directory: Path, fetch: Fetch
) -> None:
    online.add("org/gated", directory, is_gated=True)
    online.add("org/private", directory, is_private=True)
    gated, private = fetch("org/gated", "org/private").splitlines()
    assert gated.startswith("ModelError: model: expected a repository that you may read, got org/")
    assert f"accept its licence at {online.endpoint}/org/gated, then set HF_TOKEN" in gated
    assert "HF_TOKEN" in private
    for path in fetch("org/gated", "org/private", HF_TOKEN=TOKEN).splitlines():
        assert "config.json" in files_of(Path(path))


def test_offline_with_and_without_the_cache(online: Hub, directory: Path, fetch: Fetch) -> None:
    online.add("org/name", directory)
    said = fetch("org/name", **OFFLINE)
    assert said.startswith("ModelNotFoundError: model: expected a path, or a repository in the")
    assert "HF_HUB_OFFLINE is set; unset it" in said
    fetched = fetch("org/name")
    assert fetch("org/name", **OFFLINE) == fetched
    assert fetch("org/name", HF_ENDPOINT="http://127.0.0.1:9") == fetched  # no server there


def test_no_network(fetch: Fetch) -> None:
    said = fetch("org/name", HF_ENDPOINT="http://127.0.0.1:9")
    assert said.startswith("ModelNotFoundError: model: expected a path, or a repository of http://")
    assert "got org/name and no answer from there: look at the network" in said


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_args: object, **_settings: object) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
    with pytest.raises(ModelError, match=r"expected room for org/name in .* HF_HOME"):
        hub.fetch_model("org/name")


def test_repositories_without_a_model_that_eecore_reads(
    online: Hub, tmp_path: Path, fetch: Fetch
) -> None:
    made = {name: tmp_path / name for name in ("ggufs", "pickles", "adapter", "nothing")}
    for path in made.values():
        path.mkdir()
    for name in ("a.gguf", "b.gguf"):
        (made["ggufs"] / name).write_text("GGUF")
    for name in ("config.json", "pytorch_model.bin"):
        (made["pickles"] / name).write_text("{}")
    (made["adapter"] / "adapter_config.json").write_text("{}")
    (made["nothing"] / "README.md").write_text("soon")
    for name, path in made.items():
        online.add(f"org/{name}", path, path)
    one_of = "model: expected one of org/ggufs:a.gguf org/ggufs:b.gguf, got org/ggufs"
    expected = {
        "org/ggufs": one_of,
        "org/ggufs:Q4_K_M": f"{one_of}:Q4_K_M",
        "org/ggufs:c.gguf": f"{one_of}:c.gguf",
        "org/ggufs@v1": "org/ggufs@v1:a.gguf",
        "org/pickles": "it has pytorch_model.bin, and eecore reads no pickles",
        "org/pickles:pytorch_model.bin": "expected a GGUF file of org/pickles",
        "org/adapter": "merge it into its model first",
        "org/nothing": "expected a repository with config.json",
    }
    for text, said in zip(expected.values(), fetch(*expected).splitlines(), strict=True):
        assert text in said
    assert not {name for name in online.fetched if name.endswith((".bin", ".gguf"))}


# What is an id


NO_IDS = ["name", "a/b/c", "./a/b", "/a/b", "~/a", "-a/b", "a/b c", "a/b.gguf", "a/b.json", "a/b@"]
NO_IDS += ["", "a/b@x@y", "a/b:x.gguf:y.gguf", "a/\u00e9", f"a/{'b' * 100}", "a\\b/c"]


@pytest.mark.parametrize("said", NO_IDS)
def test_what_is_no_id_is_a_path(said: str) -> None:
    assert hub.Repository.of(said) is None


def test_a_path_on_disk_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert hub.Repository.of("org/name") is not None
    assert hub.Repository.of(Path("org/name")) is None
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert hub.Repository.of("org/name") is None
    assert hub.fetch_model("org/name") == Path("org/name")


def test_names_of_models(tmp_path: Path) -> None:
    in_cache = tmp_path / "models--org--a-name" / "snapshots" / "0123"
    assert hub.name_of(in_cache) == "org/a-name"
    assert hub.name_of(in_cache / "small.Q4.gguf") == "small.Q4"
    assert hub.name_of(tmp_path / "Llama-3.2-1B") == "Llama-3.2-1B"


# Where a model is asked for, an id will do


def test_commands_take_ids(online: Hub, tmp_path: Path, environment: dict[str, str]) -> None:
    source = write_model(tmp_path / "model")
    write_pack(tmp_path / "pack", eecore.load(source))
    (tmp_path / "ggufs").mkdir()
    write_gguf(tmp_path / "ggufs" / "tiny.gguf", source)
    drafts = mtp_heads.write_gguf(mtp_heads.write_qwen3_5(tmp_path / "qwen"))
    drafts.rename(tmp_path / "ggufs" / "drafts.gguf")
    online.add("org/name", source)
    online.add("org/pack", tmp_path / "pack")
    online.add("org/ggufs", tmp_path / "ggufs")

    asked = ("hi", "--json", "--max-tokens", "4", "-t", "0", "--exit", "head")
    commands = [
        ("generate", "org/name", *asked, "--exits", "org/pack"),
        ("generate", str(source), *asked, "--exits", str(tmp_path / "pack")),
        ("generate", DRAFTS, *asked, "--draft-head", DRAFTS),
        ("info", "org/name", "--json"),
        ("convert", "org/ggufs:tiny.gguf", "made"),
        ("generate", "org/nme", "hi"),
    ]
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS, json.dumps(commands)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    there, here, inside, info, converted, missing = json.loads(done.stdout)
    assert (there["code"], there["stderr"]) == (0, "")
    tokens = [json.loads(each["stdout"])["token_ids"] for each in (there, here)]
    assert tokens[0] == tokens[1]
    assert json.loads(inside["stdout"])["stats"]["drafted"] > 0
    assert json.loads(info["stdout"])["config"]["num_layers"]
    assert converted["code"] == 0
    assert (tmp_path / "made" / "config.json").is_file()
    assert missing["code"] == 3
    (line,) = missing["stderr"].splitlines()
    assert line.startswith("error: model: expected a path, or a repository of http://127.0.0.1")


def test_a_server_calls_a_model_as_its_repository_is_called(
    online: Hub, tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    online.add("org/name-1.5", write_model(tmp_path / "model"))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    with started("org/name-1.5", "--alias", "full") as (process, address):
        models = httpx.get(f"{address}/v1/models").json()["data"]
        assert [model["id"] for model in models] == ["org/name-1.5", "org/name-1.5:full"]
        assert httpx.get(f"{address}/v1/models/org/name-1.5").status_code == 200
        body = {"model": "org/name-1.5:full", "prompt": "hi", "max_tokens": 2}
        assert httpx.post(f"{address}/v1/completions", json=body).status_code == 200
        process.terminate()
        assert process.wait(60) == 0
