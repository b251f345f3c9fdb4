package dialect

import (
	"fmt"
	"strings"
)

// maxNameLength keeps a table's name, and those of its indexes, below the 63 bytes after which PostgreSQL cuts names off
// without an error.
const maxNameLength = 48

// Table is a validated table name.
type Table struct {
	// Schema is the schema (on MySQL: the database) that the name was qualified with, or "".
	Schema string

	// Name is the name of the table itself.
	Name string
}

// ParseTable returns the table that name means: "table" or "schema.table", of ASCII letters, digits and _ each. Names are
// always quoted, so they keep their case.
func ParseTable(name string) (Table, error) {
	schema, table, qualified := strings.Cut(name, ".")
	if !qualified {
		schema, table = "", name
	}
	for _, part := range []string{schema, table} {
		if part == "" && (part == table || qualified) {
			return Table{}, fmt.Errorf("%q is not a table name: a part of it is empty", name)
		}
		if len(part) > maxNameLength {
			return Table{}, fmt.Errorf("%q is not a table name: a part of it is longer than %d bytes", name, maxNameLength)
		}
		for _, r := range part {
			if r != '_' && (r < '0' || r > '9') && (r < 'A' || r > 'Z') && (r < 'a' || r > 'z') {
				return Table{}, fmt.Errorf(
					"%q is not a table name: use ASCII letters, digits and _, in \"table\" or \"schema.table\"", name)
			}
		}
	}
	return Table{Schema: schema, Name: table}, nil
}

// Quoted returns the qualified name in quotes. ParseTable let none into it.
func (t Table) Quoted(quote string) string {
	if t.Schema == "" {
		return quote + t.Name + quote
	}
	return quote + t.Schema + quote + "." + quote + t.Name + quote
}
