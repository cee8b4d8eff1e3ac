"""Inference engines: the protocol, the HTTP client, the local torch service, the SGLang launcher."""
