"""Goal: the rights that `docs/howto/permissions.md` gives suffice, and none of them is too many."""

import json
import re
import uuid
from pathlib import Path
from typing import Any

import anyio.to_thread
import botocore.session
import pytest

import aiopersist as ap
from aiopersist.testing import servers
from tests.support.schemas import SCHEMA

PAGE = (Path(__file__).parents[2] / "docs/howto/permissions.md").read_text(encoding="utf-8")
WRITER, READER = map(json.loads, re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)[:2])  # those of S3
GRANTS = re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL)
PREFIX = "prefix"
SETTINGS = ap.Settings(retry_timeout_s=20, inline_writes_single_max_bytes=0)


def without(policy: Any, action: str) -> Any:
    """The policy without that action."""
    text = json.dumps(policy)
    return json.loads(text.replace(f', "{action}"', "").replace(f'"{action}", ', ""))


POLICIES = {"writer": WRITER, "reader": READER} | {
    f"no {action}": without(WRITER, f"s3:{action}") for action in ("GetObject", "PutObject", "DeleteObject")
}


def users(server: servers.S3Server) -> dict[str, str]:
    """The URL of the location for a user of each policy."""
    session = botocore.session.get_session()
    secrets = {"aws_access_key_id": "root", "aws_secret_access_key": "root"}
    iam = session.create_client("iam", server.region, endpoint_url=server.endpoint, **secrets)
    found = {}
    for name, policy in POLICIES.items():
        user = name.replace(" ", "-")
        objects = policy["Statement"][1]
        # the simulation asks for the right to delete many objects of the bucket, S3 of each object
        here = {**policy, "Statement": [*policy["Statement"], {**objects, "Resource": "arn:aws:s3:::bucket"}]}
        document = json.dumps(here).replace(":::bucket", f":::{server.bucket}")
        iam.create_user(UserName=user)
        iam.put_user_policy(UserName=user, PolicyName="p", PolicyDocument=document)
        key = iam.create_access_key(UserName=user)["AccessKey"]
        options = (
            f"access_key={key['AccessKeyId']}&secret_key={key['SecretAccessKey']}&region={server.region}"
        )
        secret = options.replace("/", "%2F").replace("+", "%2B")
        found[name] = f"s3://{server.bucket}/{PREFIX}?endpoint={server.endpoint}&{secret}"
    return found


@pytest.mark.slow
@pytest.mark.blocks_loop  # while the server starts
async def test_the_policies_suffice_and_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: with a server that enforces policies a writer appends, compacts, collects and sweeps, a reader
    reads; and each right of the writer is missed when it is taken away."""
    monkeypatch.setenv("INITIAL_NO_AUTH_ACTION_COUNT", str(1 + 3 * len(POLICIES)))  # what this test sets up
    with servers.s3_server("moto") as server:
        urls = await anyio.to_thread.run_sync(users, server)
        consensus = f"mem://{uuid.uuid4().hex}"

        def opened(who: str, **options: Any) -> Any:
            return ap.open(
                blob=urls[who], consensus=consensus, settings=SETTINGS, maintenance=False, **options
            )

        async with opened("writer") as client, client.writer("t", SCHEMA) as writer:
            for n in range(3):
                await writer.write([(f"k{n}", n)])
            await client.admin.retain("t", 1)
            await client.admin.force_compaction("t")
            await client.admin.force_gc("t")
            await client.admin.sweep_leaked_blobs(dry_run=False)
            assert (await client.admin.fsck("t")).ok
        async with opened("reader", readonly=True) as client, client.reader("t", SCHEMA) as reader:
            async with reader.snapshot() as snapshot:
                assert len(await snapshot.rows()) == 3
        for who, call in {"no GetObject": read, "no PutObject": append, "no DeleteObject": collect}.items():
            with pytest.raises(ap.StorageUnavailable, match=r"(?i)denied|forbidden|403"):
                async with opened(who) as client:
                    await call(client)


async def read(client: ap.Client) -> None:
    async with client.reader("t", SCHEMA) as reader, reader.snapshot() as snapshot:
        await snapshot.rows()


async def append(client: ap.Client) -> None:
    async with client.writer("t", SCHEMA) as writer:
        await writer.write([("new", 1)])


async def collect(client: ap.Client) -> None:
    for _ in range(2):
        await append(client)
        await client.admin.force_compaction("t")
    await client.admin.force_gc("t")


async def test_the_grants_suffice(
    postgres_server: Any, postgres_schema: str, admin: Any, tmp_path: Path
) -> None:
    """Goal: a role with the grants of a writer writes and maintains, one with those of a reader reads."""
    url, blob = postgres_server.url(postgres_schema), f"file://{tmp_path}/blob"
    async with ap.open(blob=blob, consensus=url) as client:
        await client.ping()
    roles = {name: f"{name}_{postgres_schema}" for name in ("writer", "reader")}
    for (name, role), grants in zip(roles.items(), GRANTS, strict=True):
        await admin.execute(f"CREATE ROLE {role} LOGIN")
        await admin.execute(grants.replace("persist", postgres_schema).replace(f"TO {name}", f"TO {role}"))

    def theirs(name: str) -> str:
        return str(url.replace("postgres://postgres@", f"postgres://{roles[name]}@"))

    async with ap.open(blob=blob, consensus=theirs("writer")) as client:
        async with client.writer("t", SCHEMA) as writer:
            await writer.write([("a", 1)])
            await client.admin.retain("t", 1)
            await client.admin.force_compaction("t")
            await client.admin.force_gc("t")
            await client.admin.maintain()
        async with ap.open(blob=blob, consensus=theirs("reader"), readonly=True) as other:
            async with other.reader("t", SCHEMA) as reader, reader.snapshot(0) as snapshot:
                assert await snapshot.rows() == [("a", 1, 1)]
        with pytest.raises(ap.StorageUnavailable, match="permission"):
            async with ap.open(blob=blob, consensus=theirs("reader")) as other:
                await append(other)
        await client.admin.drop("t")
        await client.admin.maintain()
    for role in roles.values():
        await admin.execute(f"DROP OWNED BY {role}")
        await admin.execute(f"DROP ROLE {role}")
