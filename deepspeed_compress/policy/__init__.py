"""Decisions between steps about the settings in force. All ranks decide alike, because they use the same figures."""
