"""Ids of events, by which a client comes back: places in a feed, signed.

A place has a checksum and no secret, so whoever knows its form could make another one: of an earlier time, to
read what was deleted since, or of another stream. So an id is a tag and a place, and the tag is the HMAC of
the place under a key of the stream. That key is made of

- a secret of the location (`location_key`): all processes agree on it, readonly ones, too, and a restart
  changes nothing;
- what the stream shows: how it begins, and which keys it has. The place names its table by itself;
- a text of the application, as the id of a user.

So an id is good for streams that show the same to the same, in any process, and for no others. It does not
expire, and is no secret: who has it may go on where it was given.
"""

import base64
import hashlib
import hmac
import json

from aiopersist.base.errors import InvalidUsage, UsageKind, shown
from aiopersist.fastapi.events import EventPlace, place_of
from aiopersist.storage.cache import CacheBlob
from aiopersist.storage.identity import location_key

PURPOSE = "ids of events"
TAG_BYTES = 16
TAG_CHARS = 22
MARK = "."


class EventIds:
    """The ids of one stream."""

    def __init__(self, key: bytes) -> None:
        self._key = hmac.new(key, digestmod=hashlib.sha256)

    @classmethod
    async def of(cls, blob: CacheBlob, *of_what: str) -> "EventIds":
        """Of a stream of the location of that blob store: the texts tell it from others."""
        secret = await location_key(blob, PURPOSE)
        return cls(hmac.digest(secret, json.dumps(of_what).encode(), hashlib.sha256))

    def text(self, place: EventPlace) -> str:
        """The id of a place."""
        return self._tag(str(place)) + MARK + str(place)

    def place(self, text: str) -> EventPlace:
        """The place of an id; `InvalidUsage` of kind `INVALID_CURSOR` for what was not given by such a
        stream."""
        tag, place = text[:TAG_CHARS], text[TAG_CHARS + 1 :]
        is_ours = text.isascii() and text[TAG_CHARS : TAG_CHARS + 1] == MARK
        if not is_ours or not hmac.compare_digest(tag, self._tag(place)):
            raise InvalidUsage(UsageKind.INVALID_CURSOR, f"{shown(text, 40)} is no id of this stream")
        return place_of(place)

    def _tag(self, place: str) -> str:
        signing = self._key.copy()
        signing.update(place.encode())
        return base64.urlsafe_b64encode(signing.digest()[:TAG_BYTES]).decode()[:TAG_CHARS]
