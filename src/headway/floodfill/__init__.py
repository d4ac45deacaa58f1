"""Flood-filling networks: neurons from volumes of electron microscopy."""
