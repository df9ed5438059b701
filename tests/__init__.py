"""Tests of `lightning_d9d`: the folders mirror the package, `harness/` holds what they share."""
