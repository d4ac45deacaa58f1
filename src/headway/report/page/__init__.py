"""The text and tables of the report page, as plain data for its template.

`facts` has the headlines; `sections` the parts that only some runs have. The template in
`report/templates` escapes every text."""
