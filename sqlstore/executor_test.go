package sqlstore_test

import (
	"context"
	"database/sql"
	"errors"
	"testing"

	"github.com/watermill-inbox/inbox"
	"github.com/watermill-inbox/inbox/sqlstore"
)

// processIn runs fn as the handler of a message.
func processIn(t *testing.T, ctx context.Context, store inbox.Store, id string, fn func(context.Context) error) {
	t.Helper()
	dedup, err := inbox.NewDeduplicator(inbox.Config{Store: store})
	if err != nil {
		t.Fatal(err)
	}
	if err := dedup.Process(ctx, inbox.Key{Consumer: "orders", MessageID: id}, fn); err != nil {
		t.Fatal(err)
	}
}

func TestExecutorIsTheTransactionInAHandlerAndTheDatabaseOutside(t *testing.T) {
	t.Parallel()
	forEach(t, targets(), func(t *testing.T, target target) {
		store, db, _ := newStore(t, target)
		processIn(t, t.Context(), store, "m", func(ctx context.Context) error {
			want, ok := inbox.TxFromContext[*sql.Tx](ctx)
			if !ok {
				return errors.New("no transaction")
			}
			if got := store.Executor(ctx); got != sqlstore.Executor(want) {
				t.Errorf("the executor in a handler is %T %p", got, got)
			}
			return nil
		})
		if got := store.Executor(t.Context()); got != sqlstore.Executor(db) {
			t.Errorf("the executor outside is a %T", got)
		}
	})
}

func TestExecutorOfAHandlerThatIsOverDoesNotGoOnWithoutItsTransaction(t *testing.T) {
	t.Parallel()
	store, db, _ := newStore(t, sqliteSeveral)
	effects := newEffects(t, db)
	failed := errors.New("the handler failed")
	for name, wrapped := range map[string]inbox.Store{"plain": store, "wrapped": &wrappedStore{store}} {
		for outcome, result := range map[string]error{"committed": nil, "rolled back": failed} {
			dedup, err := inbox.NewDeduplicator(inbox.Config{Store: wrapped})
			if err != nil {
				t.Fatal(err)
			}
			var left context.Context
			key := inbox.Key{Consumer: name, MessageID: outcome}
			err = dedup.Process(t.Context(), key, func(ctx context.Context) error {
				left = ctx
				return result
			})
			if !errors.Is(err, result) {
				t.Fatal(err)
			}
			_, err = store.Executor(left).ExecContext(t.Context(), "INSERT INTO "+effects+" (id) VALUES (1)")
			if !errors.Is(err, sql.ErrTxDone) {
				t.Errorf("%s, %s: error %v", name, outcome, err)
			}
		}
	}
	wantCount(t, db, effects, 0)
}

// wrappedStore is a store inside of another, as instrumentation may have it.
type wrappedStore struct{ inbox.Store }

func TestExecutorFindsItsOwnTransactionAmongSeveral(t *testing.T) {
	t.Parallel()

	outer, outerDB, _ := newStore(t, sqliteSeveral)
	inner, innerDB, _ := newStore(t, sqliteSeveral)
	third, thirdDB, _ := newStore(t, sqliteSeveral)
	processIn(t, t.Context(), &wrappedStore{outer}, "m", func(ctx context.Context) error {
		outerTx, _ := inbox.TxFromContext[*sql.Tx](ctx)
		processIn(t, ctx, inner, "m", func(ctx context.Context) error {
			innerTx, _ := inbox.TxFromContext[*sql.Tx](ctx)
			if innerTx == outerTx {
				t.Error("both have one transaction")
			}
			if outer.Executor(ctx) != sqlstore.Executor(outerTx) || inner.Executor(ctx) != sqlstore.Executor(innerTx) {
				t.Error("a store did not find its own transaction")
			}
			if third.Executor(ctx) != sqlstore.Executor(thirdDB) {
				t.Error("a store found another's transaction")
			}
			return nil
		})
		if inner.Executor(ctx) != sqlstore.Executor(innerDB) {
			t.Error("a store found a transaction that is over")
		}
		return nil
	})
	if outer.Executor(t.Context()) != sqlstore.Executor(outerDB) {
		t.Error("a store found a transaction without a context that has one")
	}
}
