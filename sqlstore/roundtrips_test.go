package sqlstore_test

import (
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/watermill-inbox/inbox/internal/wireproxy"
	"github.com/watermill-inbox/inbox/sqlstore"
)

// TestRoundTrips counts the waits for the server, once the connection is warm, with one statement in the handler.
func TestRoundTrips(t *testing.T) {
	t.Parallel()

	for _, test := range []struct {
		target           target
		driver           string
		first, duplicate int
		withOutputs      int
	}{
		{pgxStdlib, "pgx", 4, 4, 5},
		{libPQ, "postgres", 4, 4, 5},
		{mariaDB, "mysql", 5, 4, 5},
	} {
		t.Run(test.target.name, func(t *testing.T) {
			t.Parallel()

			dsn := postgresDSN
			if test.target.dialect == sqlstore.MySQL {
				dsn = mariaDBDSN
			}
			_, _, table := newStore(t, test.target)
			proxy, proxied := wireproxy.Through(t, dsn(t))
			db := open(t, test.driver, proxied)
			db.SetMaxOpenConns(1)
			store := storeOn(t, db, sqlstore.Config{Dialect: test.target.dialect, Table: table})

			first := func(id string, outputs ...*message.Message) {
				t.Helper()
				tx, native := begin(t, store, id)
				if _, err := native.ExecContext(t.Context(), "SELECT 1"); err != nil {
					t.Fatal(err)
				}
				if err := tx.Commit(t.Context(), outputs); err != nil {
					t.Fatal(err)
				}
			}
			output := message.NewMessage("output", []byte("payload"))
			first("warm")
			recorded(t, store, "warm")
			first("warm with outputs", output)

			for _, delivery := range []struct {
				name string
				run  func()
				want int
			}{
				{"first", func() { first("measured") }, test.first},
				{"duplicate", func() { recorded(t, store, "measured") }, test.duplicate},
				{"first with outputs", func() { first("measured with outputs", output) }, test.withOutputs},
			} {
				proxy.Reset()
				delivery.run()
				if got := proxy.Snapshot(); got.RoundTrips != delivery.want {
					t.Errorf("%s: %d round trips, want %d:\n%s", delivery.name, got.RoundTrips, delivery.want, got)
				}
			}
		})
	}
}
