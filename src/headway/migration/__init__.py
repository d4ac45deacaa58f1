"""Configurations of DeepSpeed, Accelerate and torchtitan, translated key by key."""

from headway.migration.formats import FORMATS, ImportRequest, translate_file
from headway.migration.recipe_text import RecipeParts, recipe_text
from headway.migration.settings import ImportedCall, ImportedSettings
from headway.migration.translation import KeyOutcome, TranslatedConfiguration

__all__ = [
    "FORMATS",
    "ImportRequest",
    "ImportedCall",
    "ImportedSettings",
    "KeyOutcome",
    "RecipeParts",
    "TranslatedConfiguration",
    "recipe_text",
    "translate_file",
]
