"""The tests, in folders that mirror the package; tests of the whole package lie here."""
