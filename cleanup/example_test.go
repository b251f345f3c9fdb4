package cleanup_test

import (
	"context"
	"database/sql"
	"fmt"
	"log"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/watermill-inbox/inbox/cleanup"
	"github.com/watermill-inbox/inbox/sqlstore"
)

// Example cleans up as a plugin of the router whose handlers fill the inbox.
func Example() {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	db, store := openInbox(ctx)
	defer func() { _ = db.Close() }()

	events := make(metrics, 1)
	cleaner, err := cleanup.New(cleanup.Config{
		Store:             store,
		Retention:         14 * 24 * time.Hour,
		RedeliveryHorizon: 10 * 24 * time.Hour, // what the broker keeps, and time to repair what kept us from reading it
		Observer:          events,
	})
	if err != nil {
		log.Fatal(err)
	}
	router := message.NewDefaultRouter(watermill.NopLogger{})
	router.AddPlugin(cleaner.Plugin(ctx))

	go func() { _ = router.Run(ctx) }()
	event := <-events // of the first run
	fmt.Printf("deleted %d in %d batch\n", event.Deleted, event.Batches)
	fmt.Printf("the oldest one left is a day old: %t\n", event.OldestAge.Round(time.Hour) == 24*time.Hour)

	_ = router.Close()
	_ = cleaner.Close() // waits for a batch, so that the database can be closed

	// Output:
	// deleted 3 in 1 batch
	// the oldest one left is a day old: true
}

// metrics is an observer.
type metrics chan cleanup.RunEvent

func (m metrics) ObserveCleanup(event cleanup.RunEvent) { m <- event }

// A cron job needs no router: it cleans up once.
func ExampleCleaner_RunOnce() {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	db, store := openInbox(ctx)
	defer func() { _ = db.Close() }()

	cleaner, err := cleanup.New(cleanup.Config{Store: store})
	if err != nil {
		log.Fatal(err)
	}
	if err := cleaner.RunOnce(ctx); err != nil {
		log.Fatal(err)
	}
	var left string
	if err := db.QueryRowContext(ctx, "SELECT group_concat(message_id) FROM inbox").Scan(&left); err != nil {
		log.Fatal(err)
	}
	fmt.Println("left:", left)

	// Output:
	// left: yesterday
}

// A retention below the time in which messages come back would let them be processed again.
func ExampleConfig_redeliveryHorizon() {
	ctx := context.Background()
	db, store := openInbox(ctx)
	defer func() { _ = db.Close() }()

	_, err := cleanup.New(cleanup.Config{
		Store:             store,
		Retention:         24 * time.Hour,
		RedeliveryHorizon: 4 * 24 * time.Hour, // the broker's retention
	})
	fmt.Println(err)

	// Output:
	// inbox: Config.Retention is too short: Retention >= RedeliveryHorizon must hold, but 24h0m0s < 96h0m0s, and a message that is delivered again after its record was deleted is processed again
}

// openInbox returns an inbox with one record of yesterday, and three of a month ago.
func openInbox(ctx context.Context) (*sql.DB, *sqlstore.Store) {
	db, err := sql.Open("sqlite", ":memory:")
	if err != nil {
		log.Fatal(err)
	}
	db.SetMaxOpenConns(1)
	store, err := sqlstore.New(db, sqlstore.Config{Dialect: sqlstore.SQLite})
	if err != nil {
		log.Fatal(err)
	}
	if err := store.InitializeSchema(ctx); err != nil {
		log.Fatal(err)
	}
	_, err = db.ExecContext(ctx, `
INSERT INTO inbox (consumer, message_id, received_at, processed_at)
SELECT 'orders', column1, strftime('%Y-%m-%d %H:%M:%f', 'now', column2), strftime('%Y-%m-%d %H:%M:%f', 'now', column2)
FROM (VALUES ('yesterday', '-1 day'), ('old-1', '-30 days'), ('old-2', '-30 days'), ('old-3', '-30 days'))`)
	if err != nil {
		log.Fatal(err)
	}
	return db, store
}
