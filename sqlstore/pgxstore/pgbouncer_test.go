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
	"github.com/watermill-inbox/inbox/cleanup"
	"github.com/watermill-inbox/inbox/internal/testserver"
)

// TestPgBouncer processes messages over 50 connections to a PgBouncer in transaction mode that has 2 to the server, so
// that a client is on either of them from transaction to transaction. Three cleaners delete old records meanwhile.
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
			const expired = 3000
			exec(t, pool, "INSERT INTO "+table+" (consumer, message_id, received_at, processed_at) "+
				"SELECT 'orders', 'expired-' || n, now() - interval '8 days', now() - interval '8 days' FROM generate_series(1, $1) AS n", expired)
			var duplicates, deleted atomic.Int64
			var wg sync.WaitGroup
			for range 3 {
				cleaner, err := cleanup.New(cleanup.Config{Store: store, Observer: observerFunc(func(event cleanup.RunEvent) {
					deleted.Add(int64(event.Deleted))
				})})
				if err != nil {
					t.Fatal(err)
				}
				wg.Go(func() {
					if err := cleaner.RunOnce(t.Context()); err != nil {
						t.Error(err)
					}
				})
			}
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
			if got := deleted.Load(); got != expired {
				t.Errorf("%d expired records were deleted", got)
			}
			if got := count(t, pool, table); got != clients*messages {
				t.Errorf("%d records", got)
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

type observerFunc func(cleanup.RunEvent)

func (f observerFunc) ObserveCleanup(event cleanup.RunEvent) { f(event) }
