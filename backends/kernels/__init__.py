"""Kernel-level adapters: one public entry point each, called with metadata that is right by construction."""
