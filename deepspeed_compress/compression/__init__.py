"""Compressors, transforms, codecs, and error-feedback residuals. This package knows no network and no configuration."""
