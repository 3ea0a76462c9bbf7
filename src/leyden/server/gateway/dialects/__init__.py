"""One file per API dialect: a request in its format becomes a `GenerationRequest`, events become its answer."""
