package sqlstore_test

import (
	"context"
	"database/sql"
	"strings"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/go-sql-driver/mysql"

	"github.com/watermill-inbox/inbox"
	"github.com/watermill-inbox/inbox/sqlstore"
)

func noop(context.Context) error { return nil }

func TestForgetTakesAKeyAsItsMessageHasItAndAsItIsStored(t *testing.T) {
	t.Parallel()
	forEach(t, targets(), func(t *testing.T, target target) {
		store, db, table := newStore(t, target)
		dedup, err := inbox.NewDeduplicator(inbox.Config{Store: store})
		if err != nil {
			t.Fatal(err)
		}
		record := func(key inbox.Key) {
			t.Helper()
			if err := dedup.Process(t.Context(), key, noop); err != nil {
				t.Fatal(err)
			}
		}
		forget := func(key inbox.Key, left int) {
			t.Helper()
			if err := store.Forget(t.Context(), key); err != nil {
				t.Fatal(err)
			}
			wantCount(t, db, table, left)
		}
		odd, short := strings.Repeat("x\x00", 5000), "short"
		for _, key := range []inbox.Key{
			{Consumer: short, MessageID: short},
			{Consumer: short, MessageID: odd},
			{Consumer: odd, MessageID: short},
			{Consumer: odd, MessageID: odd},
		} {
			stored, err := key.Normalize()
			if err != nil {
				t.Fatal(err)
			}
			record(key)
			forget(inbox.Key{Consumer: short, MessageID: "another"}, 1)
			forget(key, 0)
			record(key)
			forget(stored, 0)
		}

		// A message's ID that reads like the stored form of another's is its own first.
		key := inbox.Key{Consumer: short, MessageID: odd}
		stored, err := key.Normalize()
		if err != nil {
			t.Fatal(err)
		}
		record(key)
		record(stored)
		forget(stored, 1)
		if err := dedup.Process(t.Context(), key, noop); err != inbox.ErrDuplicate { //nolint:errorlint // as it is
			t.Errorf("the other message was forgotten: error %v", err)
		}
		forget(stored, 0)
	})
}

// TestWritesOfTheStoreDoNotNeedAutocommit has MySQL begin a transaction with each statement, which nobody commits.
func TestWritesOfTheStoreDoNotNeedAutocommit(t *testing.T) {
	t.Parallel()
	manual := target{"mariadb-manual-commit", sqlstore.MySQL, func(tb testing.TB) *sql.DB {
		tb.Helper()
		return open(tb, "mysql", mysqlDSN(tb, func(c *mysql.Config) { c.Params = map[string]string{"autocommit": "0"} }))
	}}
	store, _, table := newStore(t, manual)
	other := mariaDB.open(t)
	process(t, store, "id", message.NewMessage("output", nil))
	if err := store.MarkOutputsPublished(t.Context(), []inbox.Key{claimOf("id").Key}); err != nil {
		t.Fatal(err)
	}
	wantCount(t, other, table+" WHERE outputs IS NULL", 1)
	if err := store.Forget(t.Context(), claimOf("id").Key); err != nil {
		t.Fatal(err)
	}
	wantCount(t, other, table, 0)
	wantError(t, store.CheckSchema(t.Context()), nil, "autocommit is off")
}
