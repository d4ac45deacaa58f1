"""Support vector machines over all ranks, with sample elimination: `SVC` as in scikit-learn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headway.errors import MissingExtra

if TYPE_CHECKING:
    from headway.svm.estimator import SVC as SVC

__all__ = ["SVC"]


def __getattr__(name: str) -> Any:
    """Load `SVC` on first use: it needs packages that headway itself does not."""
    if name not in __all__:
        raise AttributeError(f"module 'headway.svm' has no attribute {name!r}")
    try:
        from headway.svm import estimator
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("numba", "sklearn"):
            raise
        raise MissingExtra(
            f"headway.svm needs the package {error.name}, which is not installed",
            fix="pip install 'headway[svm]'",
        ) from None
    return getattr(estimator, name)
