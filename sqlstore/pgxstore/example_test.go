package pgxstore_test

import (
	"context"
	"log"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/watermill-inbox/inbox"
	"github.com/watermill-inbox/inbox/sqlstore/pgxstore"
)

// Handlers get the transaction as a pgx.Tx. It is the inbox's to commit or roll back; Begin on it is a savepoint.
func ExampleNew() {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, "postgres://localhost/shop")
	if err != nil {
		log.Fatal(err)
	}
	defer pool.Close()
	store, err := pgxstore.New(pool, pgxstore.Config{})
	if err != nil {
		log.Fatal(err)
	}
	if err := store.InitializeSchema(ctx); err != nil {
		log.Fatal(err)
	}
	dedup, err := inbox.NewDeduplicator(inbox.Config{Store: store})
	if err != nil {
		log.Fatal(err)
	}
	router := message.NewDefaultRouter(watermill.NopLogger{})
	router.AddMiddleware(dedup.Middleware)

	var subscriber message.Subscriber // of any broker
	router.AddConsumerHandler("take_from_stock", "orders", subscriber, func(msg *message.Message) error {
		tx, _ := inbox.TxFromContext[pgx.Tx](msg.Context())
		_, err := tx.Exec(msg.Context(), "UPDATE stock SET pieces = pieces - 1")
		return err
	})
	if err := router.Run(ctx); err != nil {
		log.Fatal(err)
	}
}

// A repository on the store's Executor takes part in the transaction of whichever handler calls it. Outside of handlers it
// uses the pool. Code that sqlc generates for pgx takes the Executor as its DBTX.
func ExampleStore_Executor() {
	var store *pgxstore.Store // from pgxstore.New

	takeFromStock := func(ctx context.Context, pieces int) error {
		_, err := store.Executor(ctx).Exec(ctx, "UPDATE stock SET pieces = pieces - $1", pieces)
		return err
	}
	_ = takeFromStock
}
