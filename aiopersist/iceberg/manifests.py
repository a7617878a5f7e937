"""Manifests: the Avro files that list the data files and delete files of a snapshot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from json import dumps
from typing import Any, NamedTuple

from aiopersist.iceberg.avro import by_number, container, field, optional, record

DATA, DELETES = 0, 1  # contents of a manifest, and of a file in it
ADDED = 1  # the status of a file: each snapshot lists all its files anew

_DATA_FILE = record(
    "r2",
    field("content", "int", 134),
    field("file_path", "string", 100),
    field("file_format", "string", 101),
    field("partition", record("r102"), 102),
    field("record_count", "long", 103),
    field("file_size_in_bytes", "long", 104),
    field("value_counts", optional(by_number(119, 120, "long")), 109),
    field("null_value_counts", optional(by_number(121, 122, "long")), 110),
    field("lower_bounds", optional(by_number(126, 127, "bytes")), 125),
    field("upper_bounds", optional(by_number(129, 130, "bytes")), 128),
    field("referenced_data_file", optional("string"), 143),
)
_ENTRY = record(
    "manifest_entry",
    field("status", "int", 0),
    field("snapshot_id", optional("long"), 1),
    field("sequence_number", optional("long"), 3),
    field("file_sequence_number", optional("long"), 4),
    field("data_file", _DATA_FILE, 2),
)
_SUMMARY = record(
    "r508",
    field("contains_null", "boolean", 509),
    field("contains_nan", optional("boolean"), 518),
    field("lower_bound", optional("bytes"), 510),
    field("upper_bound", optional("bytes"), 511),
)
_MANIFEST = record(
    "manifest_file",
    field("manifest_path", "string", 500),
    field("manifest_length", "long", 501),
    field("partition_spec_id", "int", 502),
    field("content", "int", 517),
    field("sequence_number", "long", 515),
    field("min_sequence_number", "long", 516),
    field("added_snapshot_id", "long", 503),
    field("added_files_count", "int", 504),
    field("existing_files_count", "int", 505),
    field("deleted_files_count", "int", 506),
    field("added_rows_count", "long", 512),
    field("existing_rows_count", "long", 513),
    field("deleted_rows_count", "long", 514),
    field("partitions", optional({"type": "array", "element-id": 508, "items": _SUMMARY}), 507),
)


class ListedFile(NamedTuple):
    """A data file, or a file of deleted positions."""

    uri: str
    rows: int
    size: int
    metrics: Mapping[str, Mapping[int, Any]] = {}
    """By the name of a field of the manifest, values by field id: counts and bounds."""
    of: str | None = None
    """The data file whose positions it deletes; `None` for a data file."""


class ListedManifest(NamedTuple):
    """A manifest in the list of a snapshot."""

    uri: str
    size: int
    content: int
    files: Sequence[ListedFile]


def manifest(schema: Mapping[str, Any], snapshot_id: int, content: int, files: Sequence[ListedFile]) -> bytes:
    """The manifest with these files, all of the same content."""
    metadata = {
        "schema": dumps(schema),
        "schema-id": str(schema["schema-id"]),
        "partition-spec": "[]",
        "partition-spec-id": "0",
        "format-version": "2",
        "content": ("data", "deletes")[content],
    }
    rows = [{"status": ADDED, "snapshot_id": snapshot_id, "data_file": _row(content, f)} for f in files]
    return container(_ENTRY, rows, metadata)


def manifest_list(snapshot_id: int, sequence: int, manifests: Sequence[ListedManifest]) -> bytes:
    """The list of the manifests of a snapshot."""
    rows = [
        {
            "manifest_path": each.uri,
            "manifest_length": each.size,
            "partition_spec_id": 0,
            "content": each.content,
            "sequence_number": sequence,
            "min_sequence_number": sequence,
            "added_snapshot_id": snapshot_id,
            "added_files_count": len(each.files),
            "existing_files_count": 0,
            "deleted_files_count": 0,
            "added_rows_count": sum(file.rows for file in each.files),
            "existing_rows_count": 0,
            "deleted_rows_count": 0,
            "partitions": [],
        }
        for each in manifests
    ]
    ids = {"snapshot-id": str(snapshot_id), "parent-snapshot-id": "null", "sequence-number": str(sequence)}
    return container(_MANIFEST, rows, {**ids, "format-version": "2"})


def _row(content: int, file: ListedFile) -> dict[str, Any]:
    return {
        "content": content,
        "file_path": file.uri,
        "file_format": "PARQUET",
        "partition": {},
        "record_count": file.rows,
        "file_size_in_bytes": file.size,
        **file.metrics,
        "referenced_data_file": file.of,
    }
