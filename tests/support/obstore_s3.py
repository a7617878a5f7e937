"""S3 by obstore, as a scheme of the tests: so the code for obstore meets a real server."""

from obstore.store import S3Store

from aiopersist.storage import urls
from aiopersist.storage.clouds import places

SCHEME = "obstore"

places._CLOUDS[SCHEME] = places._Cloud(
    "S3",
    S3Store,
    {"region": "region", "access_key": "access_key_id", "secret_key": "secret_access_key"},
    1000,
    lambda config: "https://s3.us-east-1.amazonaws.com",
)
urls._CLOUDS[SCHEME] = "azure"
urls._BUCKETS = (*urls._BUCKETS, SCHEME)
urls._blob_schemes[SCHEME] = urls._remote(urls._cloud)
urls._consensus_schemes[SCHEME] = urls._cloud_consensus


def by_obstore(url: str) -> str:
    """The same place in S3, by the other driver."""
    return url.replace("s3://", f"{SCHEME}://", 1)
