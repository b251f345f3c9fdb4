package dialect_test

import (
	"strings"
	"testing"

	"github.com/watermill-inbox/inbox/sqlstore/internal/dialect"
)

func TestTableNames(t *testing.T) {
	t.Parallel()

	for name, want := range map[string]dialect.Table{
		"inbox":                           {Name: "inbox"},
		"Inbox_2":                         {Name: "Inbox_2"},
		"billing.inbox":                   {Schema: "billing", Name: "inbox"},
		"2024.7":                          {Schema: "2024", Name: "7"},
		strings.Repeat("a", 48):           {Name: strings.Repeat("a", 48)},
		strings.Repeat("s", 48) + ".name": {Schema: strings.Repeat("s", 48), Name: "name"},
	} {
		got, err := dialect.ParseTable(name)
		if err != nil || got != want {
			t.Errorf("ParseTable(%q) = %+v, %v, want %+v", name, got, err, want)
		}
	}
	for _, name := range []string{
		"", ".", "inbox.", ".inbox", "a.b.c", "in box", `in"box`, "in`box", "in'box", "inbox;", "inbox--", "inböx", "inbox\x00",
		`"public"."inbox"`, "inbox)", strings.Repeat("a", 49), strings.Repeat("s", 49) + ".inbox",
	} {
		if got, err := dialect.ParseTable(name); err == nil {
			t.Errorf("ParseTable(%q) = %+v, want an error", name, got)
		}
	}
}
