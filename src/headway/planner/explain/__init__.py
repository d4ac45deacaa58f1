"""Why a plan takes so long and holds so much, what else there is, and why nothing fits.

Everything is asked of the search and its tables; no price is made here."""
