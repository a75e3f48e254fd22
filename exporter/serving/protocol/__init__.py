"""The KServe V2 protocol: requests and responses as bytes."""
