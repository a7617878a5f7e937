"""Ids of events, with which a client comes back: signed places in a feed.

A place has a checksum but no secret, so anybody could forge one: for an earlier time, to read rows deleted
since, or for another stream. So an id is a tag and a place; the tag is the HMAC of the place with a key of
the stream. The key is derived from

- a secret of the location (`location_key`), the same in all processes, also readonly ones, and after
  restarts;
- the stream: how it begins, and its keys. The place itself names the table;
- a text of the application, like the id of a user.

So an id is valid for streams that have all these in common, in any process, and for no others. It does not
expire, and is no secret: its holder still needs access to the stream.
"""

import base64
import hashlib
import hmac
import json

from aiopersist.base.errors import InvalidUsage, UsageKind, shown
from aiopersist.fastapi.events import EventPlace, place_of
from aiopersist.storage.cache import CacheBlob
from aiopersist.storage.identity import location_key

PURPOSE = "ids of events"  # of a secret of the location
TAG_BYTES = 16
TAG_CHARS = 22
SEPARATOR = "."


class EventIds:
    """The ids of one stream."""

    def __init__(self, key: bytes) -> None:
        self._key = hmac.new(key, digestmod=hashlib.sha256)

    @classmethod
    async def of(cls, blob: CacheBlob, *stream: str) -> "EventIds":
        """The ids of a stream; its texts `stream` differ from those of other streams of the location."""
        secret = await location_key(blob, PURPOSE)
        return cls(hmac.digest(secret, json.dumps(stream).encode(), hashlib.sha256))

    def text(self, place: EventPlace) -> str:
        """The id of a place."""
        return self._tag(str(place)) + SEPARATOR + str(place)

    def place(self, text: str) -> EventPlace:
        """The place of an id; `InvalidUsage` of kind `INVALID_CURSOR` if no such stream issued it."""
        tag, place = text[:TAG_CHARS], text[TAG_CHARS + 1 :]
        is_id = text.isascii() and text[TAG_CHARS : TAG_CHARS + 1] == SEPARATOR
        if not is_id or not hmac.compare_digest(tag, self._tag(place)):
            raise InvalidUsage(UsageKind.INVALID_CURSOR, f"{shown(text, 40)} is no id of this stream")
        return place_of(place)

    def _tag(self, place: str) -> str:
        signing = self._key.copy()
        signing.update(place.encode())
        return base64.urlsafe_b64encode(signing.digest()[:TAG_BYTES]).decode()[:TAG_CHARS]
