package pgxstore_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/watermill-inbox/inbox"
	"github.com/watermill-inbox/inbox/internal/testserver"
)

// TestPgBouncer processes messages over 50 connections to a PgBouncer in transaction mode that has 2 to the server, so
// that a client is on either of them from transaction to transaction.
func TestPgBouncer(t *testing.T) {
	t.Parallel()
	postgres := started(t, "postgres")(testserver.PostgreSQL())
	bouncer := started(t, "pgbouncer")(testserver.PgBouncer(postgres, 2))
	// The other modes prepare statements on the server in one round trip, and use them in another.
	for _, mode := range []pgx.QueryExecMode{
		pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
	} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			const clients, messages = 50, 10
			pool := newPool(t, bouncer.DSN, mode, clients)
			store, table := newStoreOn(t, pool)
			if err := store.CheckSchema(t.Context()); err != nil {
				t.Error(err)
			}
			dedup, err := inbox.NewDeduplicator(inbox.Config{Store: store, Consumer: "orders", LockTimeout: time.Minute})
			if err != nil {
				t.Fatal(err)
			}
			var duplicates atomic.Int64
			var wg sync.WaitGroup
			for client := range clients {
				wg.Go(func() {
					for n := range 2 * messages { // each message twice
						id := client*messages + n%messages
						err := dedup.Process(t.Context(), inbox.Key{MessageID: fmt.Sprint(id)}, func(ctx context.Context) error {
							_, err := store.Executor(ctx).Exec(ctx, "INSERT INTO "+effects(table)+" VALUES ($1)", id)
							return err
						})
						switch {
						case errors.Is(err, inbox.ErrDuplicate):
							duplicates.Add(1)
						case err != nil:
							t.Errorf("message %d: %v", id, err)
						}
					}
				})
			}
			wg.Wait()
			if got := duplicates.Load(); got != clients*messages {
				t.Errorf("%d duplicates", got)
			}
			if got := count(t, pool, effects(table)); got != clients*messages {
				t.Errorf("%d effects", got)
			}

			process(t, store, "with outputs", output())
			if got := recorded(t, store, "with outputs"); len(got.Outputs) != 1 {
				t.Errorf("%d outputs recorded", len(got.Outputs))
			}
			if err := store.MarkOutputsPublished(t.Context(), []inbox.Key{{Consumer: "orders", MessageID: "with outputs"}}); err != nil {
				t.Error(err)
			}
			if got := recorded(t, store, "with outputs"); len(got.Outputs) != 0 {
				t.Errorf("%d outputs left", len(got.Outputs))
			}
			if err := store.Forget(t.Context(), inbox.Key{Consumer: "orders", MessageID: "with outputs"}); err != nil {
				t.Error(err)
			}
			wantUnclaimed(t, store, "with outputs")
		})
	}
}
