// Command rabbitmq-postgres is the quickstart's handler on RabbitMQ and PostgreSQL: the same wiring, with another broker
// and another store. It stops at an interrupt, and lets handlers in flight finish.
package main

import (
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
	postgres := flag.String("postgres", "postgres://localhost/postgres", "URL of the database")
	rabbitmq := flag.String("rabbitmq", "amqp://guest:guest@localhost:5672/", "URL of the broker")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, *postgres, *rabbitmq); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context, postgres, rabbitmq string) error {
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
	dedup, err := inbox.NewDeduplicator(inbox.Config{Store: store, ShutdownGrace: 10 * time.Second, Logger: logger})
	if err != nil {
		return err
	}
	cleaner, err := cleanup.New(cleanup.Config{Store: store, Logger: logger})
	if err != nil {
		return err
	}

	config := amqp.NewDurableQueueConfig(rabbitmq)
	subscriber, err := amqp.NewSubscriber(config, logger)
	if err != nil {
		return err
	}
	publisher, err := amqp.NewPublisher(config, logger)
	if err != nil {
		return err
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
		retry.Middleware,
		middleware.Timeout(30*time.Second),
		middleware.Recoverer,
		dedup.Middleware, // the innermost
	)
	router.AddConsumerHandler("take_from_stock", "orders", subscriber, func(msg *message.Message) error {
		_, err := store.Executor(msg.Context()).Exec(msg.Context(), "UPDATE stock SET pieces = pieces - 1")
		return err
	})
	if err := router.Run(ctx); err != nil {
		return err
	}
	flush, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	return dedup.Close(flush)
}
