"""Azure and Google Cloud Storage by the library obstore: `places` says which URL is which store, `client`
makes requests, `errors` maps errors, `date` asks for the clock, `blob` and `bucket` keep the contracts."""
