package inbox_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"
	_ "modernc.org/sqlite"

	"github.com/watermill-inbox/inbox"
	"github.com/watermill-inbox/inbox/sqlstore"
)

// openShop opens a database with an inbox and a stock of 10 pieces.
func openShop() (*sql.DB, *sqlstore.Store, func()) {
	dir, err := os.MkdirTemp("", "inbox-example-")
	if err != nil {
		log.Fatal(err)
	}
	db, err := sql.Open("sqlite", "file:"+filepath.Join(dir, "shop.db")+"?_pragma=journal_mode(WAL)&_pragma=busy_timeout(5000)")
	if err != nil {
		log.Fatal(err)
	}
	store, err := sqlstore.New(db, sqlstore.Config{Dialect: sqlstore.SQLite})
	if err != nil {
		log.Fatal(err)
	}
	if err := store.InitializeSchema(context.Background()); err != nil {
		log.Fatal(err)
	}
	if _, err := db.Exec("CREATE TABLE stock AS SELECT 10 AS pieces"); err != nil {
		log.Fatal(err)
	}
	return db, store, func() {
		_ = db.Close()
		_ = os.RemoveAll(dir)
	}
}

func printStock(db *sql.DB) {
	var pieces int
	if err := db.QueryRow("SELECT pieces FROM stock").Scan(&pieces); err != nil {
		log.Fatal(err)
	}
	fmt.Println("in stock:", pieces)
}

// takeOne is a handler that takes a piece from the stock.
func takeOne(msg *message.Message) ([]*message.Message, error) {
	tx, _ := inbox.TxFromContext[*sql.Tx](msg.Context())
	_, err := tx.ExecContext(msg.Context(), "UPDATE stock SET pieces = pieces - 1")
	return nil, err
}

// The same order is delivered twice, and takes one piece.
func ExampleDeduplicator_Middleware() {
	db, store, closeShop := openShop()
	defer closeShop()
	dedup, err := inbox.NewDeduplicator(inbox.Config{Store: store})
	if err != nil {
		log.Fatal(err)
	}
	broker := gochannel.NewGoChannel(gochannel.Config{BlockPublishUntilSubscriberAck: true}, watermill.NopLogger{})
	router := message.NewDefaultRouter(watermill.NopLogger{})

	router.AddMiddleware(dedup.Middleware)
	router.AddConsumerHandler("take_from_stock", "orders", broker, func(msg *message.Message) error {
		_, err := takeOne(msg)
		return err
	})
	go func() { _ = router.Run(context.Background()) }()
	<-router.Running()

	for range 2 {
		if err := broker.Publish("orders", message.NewMessage("order-1", nil)); err != nil {
			log.Fatal(err)
		}
	}
	_ = router.Close()
	printStock(db)
	// Output: in stock: 9
}

// keepContext gives the message its context back. Timeout leaves an ended one on it, and with that one RabbitMQ's publisher,
// among others, refuses to publish the message to the poison queue.
func keepContext(h message.HandlerFunc) message.HandlerFunc {
	return func(msg *message.Message) ([]*message.Message, error) {
		ctx := msg.Context()
		defer func() { msg.SetContext(ctx) }()
		return h(msg)
	}
}

// The recommended stack of middleware: a message that cannot be processed is tried again, then poisoned, and leaves
// nothing behind in the database.
func ExampleDeduplicator_ShouldPoison() {
	db, store, closeShop := openShop()
	defer closeShop()
	dedup, err := inbox.NewDeduplicator(inbox.Config{Store: store})
	if err != nil {
		log.Fatal(err)
	}
	broker := gochannel.NewGoChannel(gochannel.Config{BlockPublishUntilSubscriberAck: true}, watermill.NopLogger{})
	router := message.NewDefaultRouter(watermill.NopLogger{})

	poison, err := middleware.PoisonQueueWithFilter(broker, "poison", dedup.ShouldPoison)
	if err != nil {
		log.Fatal(err)
	}
	retry := middleware.Retry{MaxRetries: 2, InitialInterval: time.Millisecond, ResetContextOnRetry: true}
	router.AddMiddleware(
		poison, keepContext, retry.Middleware, middleware.Timeout(10*time.Second), middleware.Recoverer, dedup.Middleware)

	router.AddConsumerHandler("take_from_stock", "orders", broker, func(msg *message.Message) error {
		fmt.Println("taking a piece for", msg.UUID)
		_, _ = takeOne(msg)
		return errors.New("no such customer")
	})
	router.AddConsumerHandler("poisoned", "poison", broker, func(msg *message.Message) error {
		fmt.Println(msg.UUID, "is poisoned:", msg.Metadata.Get(middleware.ReasonForPoisonedKey))
		return nil
	})
	go func() { _ = router.Run(context.Background()) }()
	<-router.Running()
	if err := broker.Publish("orders", message.NewMessage("order-1", nil)); err != nil {
		log.Fatal(err)
	}
	_ = router.Close()
	printStock(db)
	// Output:
	// taking a piece for order-1
	// taking a piece for order-1
	// taking a piece for order-1
	// order-1 is poisoned: no such customer
	// in stock: 10
}

// A webhook is called twice.
func ExampleDeduplicator_Process() {
	db, store, closeShop := openShop()
	defer closeShop()
	dedup, err := inbox.NewDeduplicator(inbox.Config{Store: store})
	if err != nil {
		log.Fatal(err)
	}
	webhook := func(ctx context.Context, deliveryID string) {
		key := inbox.Key{Consumer: "payment_webhook", MessageID: deliveryID}
		err := dedup.Process(ctx, key, func(ctx context.Context) error {
			_, err := store.Executor(ctx).ExecContext(ctx, "UPDATE stock SET pieces = pieces - 1")
			return err
		})
		switch {
		case errors.Is(err, inbox.ErrDuplicate):
			fmt.Println("seen before")
		case err != nil:
			fmt.Println(err)
		default:
			fmt.Println("processed")
		}
	}
	webhook(context.Background(), "evt-1")
	webhook(context.Background(), "evt-1")
	printStock(db)
	// Output:
	// processed
	// seen before
	// in stock: 9
}

// What a handler writes through its transaction is committed together with the record of the message, or not at all.
func ExampleTxFromContext() {
	db, store, closeShop := openShop()
	defer closeShop()
	dedup, err := inbox.NewDeduplicator(inbox.Config{Store: store, Consumer: "take_from_stock"})
	if err != nil {
		log.Fatal(err)
	}
	healthy := false
	handler := dedup.Middleware(func(msg *message.Message) ([]*message.Message, error) {
		tx, ok := inbox.TxFromContext[*sql.Tx](msg.Context()) // pgx.Tx with package pgxstore
		if !ok {
			return nil, errors.New("not behind the inbox")
		}
		if _, err := tx.ExecContext(msg.Context(), "UPDATE stock SET pieces = pieces - 1"); err != nil {
			return nil, err
		}
		if !healthy {
			return nil, errors.New("the printer is out of paper")
		}
		return nil, nil
	})
	msg := message.NewMessage("order-1", nil)
	_, err = handler(msg)
	fmt.Println("first delivery:", err)
	printStock(db)

	healthy = true
	_, err = handler(msg)
	fmt.Println("second delivery:", err)
	printStock(db)
	// Output:
	// first delivery: the printer is out of paper
	// in stock: 10
	// second delivery: <nil>
	// in stock: 9
}

// Publishing what the handler returned fails. The redelivery does not run the handler, and returns the same message.
func ExampleOutputMode() {
	_, store, closeShop := openShop()
	defer closeShop()
	dedup, err := inbox.NewDeduplicator(inbox.Config{Store: store, Consumer: "pay", Outputs: inbox.OutputsReplay}) // the default
	if err != nil {
		log.Fatal(err)
	}
	handler := dedup.Middleware(func(*message.Message) ([]*message.Message, error) {
		fmt.Println("paying")
		return []*message.Message{message.NewMessage("payment-1", []byte("10 EUR"))}, nil
	})
	deliver := func() *message.Message {
		msg := message.NewMessage("order-1", nil)
		outputs, err := handler(msg)
		if err != nil {
			log.Fatal(err)
		}
		for _, output := range outputs {
			fmt.Printf("to be published: %s %s\n", output.UUID, output.Payload)
		}
		return msg
	}
	deliver().Nack() // by the router, after its publish failed
	deliver().Ack()  // by the router, after its publish
	deliver()

	if err := dedup.Close(context.Background()); err != nil { // writes down that it was published
		log.Fatal(err)
	}
	// Output:
	// paying
	// to be published: payment-1 10 EUR
	// to be published: payment-1 10 EUR
}

// Duplicates are skipped, and reported.
func ExampleConfig_onDuplicate() {
	_, store, closeShop := openShop()
	defer closeShop()
	dedup, err := inbox.NewDeduplicator(inbox.Config{
		Store:    store,
		Consumer: "take_from_stock",
		OnDuplicate: func(p inbox.OnDuplicateParams) {
			fmt.Printf("%s skipped %s: processed %t\n", p.Key.Consumer, p.Key.MessageID, !p.ProcessedAt.IsZero())
		},
	})
	if err != nil {
		log.Fatal(err)
	}
	handler := dedup.Middleware(takeOne)
	for range 3 {
		if _, err := handler(message.NewMessage("order-1", nil)); err != nil {
			log.Fatal(err)
		}
	}
	// Output:
	// take_from_stock skipped order-1: processed true
	// take_from_stock skipped order-1: processed true
}

// The producer gives each copy a UUID of its own, but names the order in the metadata.
func ExampleMessageIDFromMetadata() {
	db, store, closeShop := openShop()
	defer closeShop()
	dedup, err := inbox.NewDeduplicator(inbox.Config{
		Store:     store,
		Consumer:  "take_from_stock",
		MessageID: inbox.MessageIDFromMetadata("order_id"),
		OnDuplicate: func(p inbox.OnDuplicateParams) {
			fmt.Println("skipped", p.Key.MessageID)
		},
	})
	if err != nil {
		log.Fatal(err)
	}
	handler := dedup.Middleware(takeOne)
	for range 2 {
		msg := message.NewMessage(watermill.NewUUID(), nil)
		msg.Metadata.Set("order_id", "1")
		if _, err := handler(msg); err != nil {
			log.Fatal(err)
		}
	}
	printStock(db)
	// Output:
	// skipped 1
	// in stock: 9
}
