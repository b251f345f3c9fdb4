// Command rabbitmq-postgres is the quickstart's handler on RabbitMQ and PostgreSQL: the same wiring, with another broker
// and another store, in the recommended stack of middleware. It stops at an interrupt, and lets handlers in flight finish.
//
//	go -C _examples run ./rabbitmq-postgres -postgres postgres://… -rabbitmq amqp://… -publish 100
package main

import (
	"cmp"
	"context"
	"flag"
	"log"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-amqp/v3/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/watermill-inbox/inbox"
	"github.com/watermill-inbox/inbox/cleanup"
	"github.com/watermill-inbox/inbox/sqlstore/pgxstore"
)

func main() {
	log.SetFlags(0)
	postgres := flag.String("postgres", cmp.Or(os.Getenv("DATABASE_URL"), "postgres://localhost/postgres"),
		"URL of the database (DATABASE_URL)")
	rabbitmq := flag.String("rabbitmq", cmp.Or(os.Getenv("AMQP_URL"), "amqp://guest:guest@localhost:5672/"),
		"URL of the broker (AMQP_URL)")
	orders := flag.Int("publish", 0, "how many orders to publish first, each of them twice")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, *postgres, *rabbitmq, *orders); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context, postgres, rabbitmq string, orders int) error {
	logger := watermill.NewSlogLogger(nil)
	pool, err := pgxpool.New(ctx, postgres)
	if err != nil {
		return err
	}
	defer pool.Close()
	if _, err := pool.Exec(ctx, "CREATE TABLE IF NOT EXISTS stock AS SELECT 1000 AS pieces"); err != nil {
		return err
	}

	store, err := pgxstore.New(pool, pgxstore.Config{})
	if err != nil {
		return err
	}
	if err := store.InitializeSchema(ctx); err != nil {
		return err
	}
	dedup, err := inbox.NewDeduplicator(inbox.Config{
		Store:         store,
		ShutdownGrace: 10 * time.Second,
		OnDuplicate: func(p inbox.OnDuplicateParams) {
			logger.Info("Skipped a duplicate", watermill.LogFields{"message_id": p.Key.MessageID})
		},
		Logger: logger,
	})
	if err != nil {
		return err
	}
	cleaner, err := cleanup.New(cleanup.Config{Store: store, Logger: logger})
	if err != nil {
		return err
	}
	defer cleaner.Close() // before the pool; the router does not wait for its plugins

	config := amqp.NewDurableQueueConfig(rabbitmq)
	config.Publish.ConfirmDelivery = true // else a publish succeeds before the broker has the message
	subscriber, err := amqp.NewSubscriber(config, logger)
	if err != nil {
		return err
	}
	publisher, err := amqp.NewPublisher(config, logger)
	if err != nil {
		return err
	}
	defer publisher.Close()
	for _, queue := range []string{"orders", "orders_poison"} { // RabbitMQ drops what is published to a missing queue
		if err := subscriber.SubscribeInitialize(queue); err != nil {
			return err
		}
	}

	poison, err := middleware.PoisonQueueWithFilter(publisher, "orders_poison", dedup.ShouldPoison)
	if err != nil {
		return err
	}
	retry := middleware.Retry{MaxRetries: 3, InitialInterval: 100 * time.Millisecond, ResetContextOnRetry: true, Logger: logger}
	router, err := message.NewRouter(message.RouterConfig{CloseTimeout: 30 * time.Second}, logger)
	if err != nil {
		return err
	}
	router.AddPlugin(cleaner.Plugin(ctx))
	router.AddMiddleware(
		poison,
		keepContext,
		retry.Middleware,
		middleware.Timeout(30*time.Second),
		middleware.Recoverer,
		dedup.Middleware, // the innermost
	)
	router.AddConsumerHandler("take_from_stock", "orders", subscriber, func(msg *message.Message) error {
		_, err := store.Executor(msg.Context()).Exec(msg.Context(), "UPDATE stock SET pieces = pieces - 1")
		return err
	})

	for range orders {
		order := message.NewMessage(watermill.NewULID(), []byte(`{"pieces": 1}`))
		if err := publisher.Publish("orders", order, order); err != nil {
			return err
		}
	}
	if err := router.Run(ctx); err != nil {
		return err
	}
	flush, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	return dedup.Close(flush)
}

// keepContext gives the message its context back. Timeout leaves an ended one on it, under which watermill-amqp refuses to
// publish it to the poison queue.
func keepContext(h message.HandlerFunc) message.HandlerFunc {
	return func(msg *message.Message) ([]*message.Message, error) {
		ctx := msg.Context()
		defer func() { msg.SetContext(ctx) }()
		return h(msg)
	}
}
