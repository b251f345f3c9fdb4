package cleanup_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/watermill-inbox/inbox"
	"github.com/watermill-inbox/inbox/cleanup"
)

// TestRetentionIsStrictInAnyTimeZone writes records in one time zone and deletes them in another.
func TestRetentionIsStrictInAnyTimeZone(t *testing.T) {
	t.Parallel()
	forEachDatabase(t, databases(), func(t *testing.T, database database) {
		for _, zones := range [][2]string{{"", ""}, {"+13:00", "-12:00"}, {"-12:00", "+13:00"}} {
			table := newTable(t, database)
			writer := newDeduplicator(t, table.storeOn(t, database.open(t, table.file, zones[0])))
			for _, id := range []string{"new", "within", "beyond"} {
				if err := table.process(t.Context(), writer, id); err != nil {
					t.Fatal(err)
				}
			}
			table.age(t, "within", 59*time.Minute)
			table.age(t, "beyond", 61*time.Minute)
			cleaner := newCleaner(t, cleanup.Config{
				Store: table.storeOn(t, database.open(t, table.file, zones[1])), Retention: time.Hour,
			})
			if err := cleaner.RunOnce(t.Context()); err != nil {
				t.Fatal(err)
			}
			if !table.has(t, "new") || !table.has(t, "within") || table.has(t, "beyond") {
				t.Errorf("written in %q and deleted in %q: %d records left", zones[0], zones[1], table.count(t, table.name))
			}
		}
	})
}

// TestRetentionBeginsWithTheCommit has a transaction that is as old as the retention when it commits.
func TestRetentionBeginsWithTheCommit(t *testing.T) {
	t.Parallel()
	forEachDatabase(t, databases(), func(t *testing.T, database database) {
		table := newTable(t, database)
		cleaner := newCleaner(t, cleanup.Config{Store: table.store, Retention: time.Hour})
		deduplicator := newDeduplicator(t, table.store)
		key := inbox.Key{Consumer: "orders", MessageID: "long"}
		err := deduplicator.Process(t.Context(), key, func(ctx context.Context) error {
			time.Sleep(150 * time.Millisecond) // for no handler that takes longer is the time of the claim good enough
			tx, _ := inbox.TxFromContext[*sql.Tx](ctx)
			columns := "received_at = " + fmt.Sprintf(table.past, "received_at", (2*time.Hour).Microseconds())
			if database.name == postgreSQL.name { // which writes both with the claim
				columns += ", processed_at = " + fmt.Sprintf(table.past, "processed_at", (2*time.Hour).Microseconds())
			}
			_, err := tx.ExecContext(ctx, "UPDATE "+table.name+" SET "+columns)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		if err := cleaner.RunOnce(t.Context()); err != nil {
			t.Fatal(err)
		}
		if !table.has(t, "long") {
			t.Error("the record is gone")
		}
	})
}

// TestDeletedMessageIsProcessedAgain is what the retention means.
func TestDeletedMessageIsProcessedAgain(t *testing.T) {
	t.Parallel()
	forEachDatabase(t, databases(), func(t *testing.T, database database) {
		table := newTable(t, database)
		deduplicator := newDeduplicator(t, table.store)
		cleaner := newCleaner(t, cleanup.Config{Store: table.store, Retention: time.Hour})
		runs := 0
		for _, want := range []struct {
			err  error
			runs int
		}{{nil, 1}, {inbox.ErrDuplicate, 1}, {nil, 2}} {
			err := deduplicator.Process(t.Context(), inbox.Key{Consumer: "orders", MessageID: "1"}, func(context.Context) error {
				runs++
				return nil
			})
			if !errors.Is(err, want.err) || runs != want.runs {
				t.Errorf("%v after %d runs, want %v after %d", err, runs, want.err, want.runs)
			}
			if want.err != nil {
				table.age(t, "1", 2*time.Hour)
			}
			if err := cleaner.RunOnce(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
	})
}

func TestUnpublishedOutputsAreKeptAndReported(t *testing.T) {
	t.Parallel()
	forEachDatabase(t, databases(), func(t *testing.T, database database) {
		table := newTable(t, database)
		tx, err := table.store.Begin(t.Context(), inbox.Claim{
			Key: inbox.Key{Consumer: "orders", MessageID: "stranded"}, LockTimeout: time.Second,
		})
		if err != nil {
			t.Fatal(err)
		}
		if err := tx.Commit(t.Context(), []*message.Message{message.NewMessage("output", nil)}); err != nil {
			t.Fatal(err)
		}
		table.age(t, "stranded", 2*time.Hour)
		if err := table.process(t.Context(), newDeduplicator(t, table.store), "young"); err != nil {
			t.Fatal(err)
		}
		table.age(t, "young", 30*time.Minute)
		observer := &observer{}
		cleaner := newCleaner(t, cleanup.Config{Store: table.store, Retention: time.Hour, Observer: observer})
		if err := cleaner.RunOnce(t.Context()); err != nil {
			t.Fatal(err)
		}
		event := observer.observed()[0]
		wantBetween(t, "the oldest age", event.OldestAge, 30*time.Minute, time.Hour)
		if event.Stranded != 1 || event.Deleted != 0 || !table.has(t, "stranded") {
			t.Errorf("observed %+v", event)
		}
	})
}

// TestReplicasBesideClaims has three cleaners delete records whose messages are delivered again at the same time.
func TestReplicasBesideClaims(t *testing.T) {
	t.Parallel()
	forEachDatabase(t, databases(), func(t *testing.T, database database) {
		const expired, workers, messages = 500, 4, 100
		table := newTable(t, database)
		table.fillWith(t, expired, database.randomID)
		var retries atomic.Int64
		deduplicator, err := inbox.NewDeduplicator(inbox.Config{
			Store:    table.store,
			Observer: deliveryObserver(func(event inbox.DeliveryEvent) { retries.Add(int64(event.Retries)) }),
		})
		if err != nil {
			t.Fatal(err)
		}
		logger := watermill.NewCaptureLogger()
		for i := range messages {
			if err := table.process(t.Context(), deduplicator, fmt.Sprint(i)); err != nil {
				t.Fatal(err)
			}
		}
		table.exec(t, fmt.Sprintf("UPDATE %s SET received_at = %s, processed_at = %s", table.name,
			fmt.Sprintf(table.past, "received_at", (2*time.Hour).Microseconds()),
			fmt.Sprintf(table.past, "processed_at", (2*time.Hour).Microseconds())))
		table.exec(t, "DELETE FROM "+table.effects)

		var deleted atomic.Int64
		var cleaners, claims sync.WaitGroup
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		for range 3 {
			cleaner := newCleaner(t, cleanup.Config{
				Store:     table.storeOn(t, database.open(t, table.file, "")),
				Retention: time.Hour, BatchSize: 10, Interval: time.Millisecond, BatchPause: time.Millisecond,
				Logger: logger,
				Observer: observerFunc(func(event cleanup.RunEvent) {
					deleted.Add(int64(event.Deleted))
					if event.Err != nil && ctx.Err() == nil {
						t.Error(event.Err)
					}
				}),
			})
			cleaners.Go(func() {
				if err := cleaner.Run(ctx); err != nil {
					t.Error(err)
				}
			})
		}
		for worker := range workers {
			claims.Go(func() {
				for i := worker; i < messages; i += workers {
					for {
						err := table.process(t.Context(), deduplicator, fmt.Sprint(i))
						if err == nil {
							break
						}
						if !errors.Is(err, inbox.ErrDuplicate) { // which it is until its record was deleted
							t.Errorf("message %d: %v", i, err)
							return
						}
					}
				}
			})
		}
		claims.Wait()
		for table.count(t, table.name) > messages && !t.Failed() {
			time.Sleep(time.Millisecond)
		}
		cancel()
		cleaners.Wait()
		if deleted.Load() != expired+messages || table.count(t, table.effects) != messages {
			t.Errorf("%d deleted, %d effects", deleted.Load(), table.count(t, table.effects))
		}
		// On PostgreSQL there is nothing to deadlock on. MariaDB's claims of a deleted key can, with each other.
		failed := logged(logger, watermill.DebugLogLevel)
		if database.name == postgreSQL.name && (failed > 0 || retries.Load() > 0) {
			t.Errorf("%d batches failed, and %d transactions", failed, retries.Load())
		}
	})
}

type deliveryObserver func(inbox.DeliveryEvent)

func (f deliveryObserver) ObserveDelivery(event inbox.DeliveryEvent) { f(event) }

type observerFunc func(cleanup.RunEvent)

func (f observerFunc) ObserveCleanup(event cleanup.RunEvent) { f(event) }

// TestInboxReachesAPlateau processes messages until most of them are forgotten again, over one connection that handlers and
// the cleaner share.
func TestInboxReachesAPlateau(t *testing.T) {
	t.Parallel()
	forEachDatabase(t, databases(), func(t *testing.T, database database) {
		table := newTable(t, database)
		table.db.SetMaxOpenConns(1)
		deduplicator := newDeduplicator(t, table.store)
		cleaner := newCleaner(t, cleanup.Config{Store: table.store, Retention: 50 * time.Millisecond, Interval: 10 * time.Millisecond})
		stop := start(t, cleaner)
		for i := 0; ; i++ {
			if err := table.process(t.Context(), deduplicator, fmt.Sprint(i)); err != nil {
				t.Fatal(err)
			}
			if i%100 == 99 && i > 10*table.count(t, table.name) {
				break
			}
		}
		stop()
	})
}
