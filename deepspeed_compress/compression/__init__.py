"""Compressors, transforms, codecs, and error-feedback residuals. They depend on no network and no configuration."""
