"""What a user meets when a disk, a bucket or a file is not as it should be: messages name the object."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import boto3
import pytest
import s3fs

from megloom.compute.graph.schemas import from_table
from megloom.compute.store.errors import CorruptFile, StoreError
from megloom.compute.store.files import Folder
from megloom.compute.store.journal import MemoryJournal
from megloom.compute.store.offload import InlineOffload
from megloom.compute.store.reader import MegReader
from megloom.compute.store.seal import write_step
from megloom.compute.store.sqlite_journal import SqliteJournal
from megloom.compute.store.store import MegStore

READ_ONLY = {
    "Version": "2012-10-17",
    "Statement": [{"Effect": "Allow", "Action": ["s3:Get*", "s3:List*"], "Resource": "*"}],
}


def fill(disk: Path) -> Path:
    """Takes all space that is left."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(4096))
    return filler


def segments(build: Any, first: int, num: int) -> list[Any]:
    return [build.segment(f"s{number:06d}", token_ids=[number] * 300) for number in range(first, first + num)]


def test_a_journal_on_a_full_disk_loses_nothing_that_was_acknowledged(small_disk: Path, build: Any) -> None:
    path = small_disk / "journal.sqlite"

    async def main() -> None:
        async with SqliteJournal.open(path, InlineOffload()) as journal:
            for segment in segments(build, 0, 50):
                journal.append(segment, 1)
            await journal.flush()
            filler = fill(small_disk)
            for segment in segments(build, 50, 1000):
                journal.append(segment, 1)
            with pytest.raises(StoreError, match=r"journal \S+journal\.sqlite: database or disk is full"):
                await journal.flush()
            copy = small_disk.parent / "copy"
            copy.mkdir()
            for file in small_disk.glob("journal.sqlite*"):  # what a process that starts now would find
                (copy / file.name).write_bytes(file.read_bytes())
            async with SqliteJournal.open(copy / path.name, InlineOffload()) as found:
                assert await found.load() == segments(build, 0, 50)
            filler.unlink()
            await journal.flush()
            assert await journal.load() == segments(build, 0, 1050)

    asyncio.run(main())


def test_a_seal_on_a_full_disk_keeps_the_step_open_and_succeeds_once_there_is_space(
    small_disk: Path, tmp_path: Path, build: Any
) -> None:
    root = str(small_disk / "store")

    async def main() -> None:
        offload = InlineOffload()
        async with SqliteJournal.open(tmp_path / "journal.sqlite", offload) as journal:
            store = MegStore(root=root, journal=journal, offload=offload)
            await store.recover("r")
            for segment in segments(build, 0, 300):
                store.record(segment)
            await store.flush()
            filler = fill(small_disk)
            with pytest.raises(StoreError, match=r"disk/store\S* .*No space left on device"):
                await store.seal("r", 1)
            assert store.reader.sealed_steps("r") == []
            assert await store.unsealed() == segments(build, 0, 300)
            filler.unlink()
            manifest = await store.seal("r", 1)
            assert [f.name for f in manifest.files] == [
                f.name for f in await files_elsewhere(tmp_path, build)
            ]
            assert from_table("segments", store.reader.read_table("r", "segments")) == segments(build, 0, 300)

    asyncio.run(main())


async def files_elsewhere(tmp_path: Path, build: Any) -> Any:
    """The files of the same step, sealed where there was space all along."""
    return write_step(Folder(str(tmp_path / "spacious")), "r", 1, segments(build, 0, 300), None, {}).files


def test_a_disk_that_fills_up_while_a_file_is_written_is_named_with_the_step(
    small_disk: Path, build: Any
) -> None:
    filler = fill(small_disk)
    with filler.open("r+b") as file:
        file.truncate(filler.stat().st_size - 65536)  # enough for a folder, too little for the file
    noise = random.Random(0)
    many = [build.segment(f"s{n}", token_ids=noise.choices(range(100_000), k=300)) for n in range(500)]
    where = r"cannot write a file of \S+/disk/store/meg/r/step=000001: .*No space left on device"
    with pytest.raises(StoreError, match=where):
        write_step(Folder(str(small_disk / "store")), "r", 1, many, None, {})
    assert list((small_disk / "store" / "meg" / "r" / "step=000001").iterdir()) == []


def user_who_may_only_read(s3_url: str) -> dict[str, str]:
    """The keys of a new user; from now on the server checks every request."""
    iam = boto3.client("iam")
    iam.create_user(UserName="reader")
    iam.put_user_policy(UserName="reader", PolicyName="read", PolicyDocument=json.dumps(READ_ONLY))
    keys = iam.create_access_key(UserName="reader")["AccessKey"]
    iam.close()
    plain = {"Content-Type": "text/plain"}
    reset = urllib.request.Request(f"{s3_url}/moto-api/reset-auth", data=b"0", headers=plain, method="POST")
    urllib.request.urlopen(reset, timeout=10).close()
    return {"AWS_ACCESS_KEY_ID": keys["AccessKeyId"], "AWS_SECRET_ACCESS_KEY": keys["SecretAccessKey"]}


def test_a_bucket_that_may_only_be_read_refuses_the_seal_by_name_and_is_still_read(
    strict_s3_bucket: str, build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = f"{strict_s3_bucket}/store"
    write_step(Folder(root), "r", 1, [build.edge()], None, {})
    for name, value in user_who_may_only_read(os.environ["AWS_ENDPOINT_URL"]).items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()

    async def main() -> None:
        store = MegStore(root=root, journal=MemoryJournal(), offload=InlineOffload())
        assert from_table("edges", store.reader.read_table("r", "edges")) == [build.edge()]
        store.record(build.edge("c", "d", step=2))
        with pytest.raises(StoreError, match=r"cannot write meg/r/writers/000001\.json: Access Denied"):
            await store.seal("r", 2)
        with pytest.raises(StoreError, match=r"store: cannot write meg/r/step=000002/edges-\w+\.parquet: "):
            write_step(Folder(root), "r", 2, [build.edge("c", "d", step=2)], 1, {})
        assert await store.unsealed() == [build.edge("c", "d", step=2)]

    asyncio.run(main())


def test_a_bucket_that_does_not_exist_is_named(s3_bucket: str, build: Any) -> None:
    with pytest.raises(StoreError, match=r"s3://no-such-bucket: cannot write meg/r/step=000001/edges"):
        write_step(Folder("s3://no-such-bucket"), "r", 1, [build.edge()], None, {})


def test_a_store_in_a_bucket_without_s3fs_names_the_extra(tmp_path: Path) -> None:
    code = """
import sys
sys.modules["s3fs"] = None
from megloom.compute.store.errors import StoreError
from megloom.compute.store.files import Folder
try:
    Folder("s3://bucket/store")
except StoreError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=60
    )
    assert "s3://bucket/store" in done.stdout and "pip install 'megloom[s3]'" in done.stdout, done.stderr


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, build: Any) -> None:
    (tmp_path / "meg").write_text("a file where a folder is expected")
    with pytest.raises(StoreError, match=r"cannot write meg/r/step=000001: .*meg"):
        write_step(Folder(str(tmp_path)), "r", 1, [build.edge()], None, {})


def test_a_journal_where_a_folder_is_expected_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")

    async def main() -> None:
        async with SqliteJournal.open(tmp_path / "runs" / "journal.sqlite", InlineOffload()):
            pass

    with pytest.raises(StoreError, match=r"journal \S+runs/journal\.sqlite"):
        asyncio.run(main())


def test_a_truncated_manifest_is_named(root: str, build: Any) -> None:
    folder, path = Folder(root), "meg/r/step=000001/manifest.json"
    write_step(folder, "r", 1, [build.edge()], None, {})
    folder.write(path, folder.read(path)[:-20])
    with pytest.raises(CorruptFile, match=r"meg/r/step=000001/manifest\.json: not a manifest"):
        MegReader(root).read_table("r", "edges")


def test_a_manifest_of_another_run_is_named(root: str, build: Any) -> None:
    folder = Folder(root)
    write_step(folder, "other", 1, [build.edge(run="other")], None, {})
    folder.write("meg/r/step=000001/manifest.json", folder.read("meg/other/step=000001/manifest.json"))
    with pytest.raises(CorruptFile, match=r"meg/r/step=000001/manifest\.json: belongs to run other step 1"):
        MegReader(root).read_table("r", "edges")


def test_a_missing_file_of_a_sealed_step_is_named(root: str, build: Any) -> None:
    folder = Folder(root)
    (file,) = write_step(folder, "r", 1, [build.edge()], None, {}).files
    folder.remove(f"meg/r/step=000001/{file.name}")
    with pytest.raises(FileNotFoundError, match=rf"no file meg/r/step=000001/{file.name}"):
        MegReader(root).read_table("r", "edges")
