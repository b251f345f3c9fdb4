// Package e2e tests the inbox with real brokers, real databases and real kills. Its tests start consumers as processes of
// their own, which are this test's binary.
package e2e_test

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-amqp/v3/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	_ "github.com/go-sql-driver/mysql"
	"github.com/jackc/pgx/v5/pgxpool"
	_ "github.com/jackc/pgx/v5/stdlib"
	_ "modernc.org/sqlite"

	"github.com/watermill-inbox/inbox"
	"github.com/watermill-inbox/inbox/sqlstore"
	"github.com/watermill-inbox/inbox/sqlstore/pgxstore"
)

const consumerVariable = "INBOX_E2E_CONSUMER"

func TestMain(m *testing.M) {
	if text := os.Getenv(consumerVariable); text != "" {
		var c consumer
		if err := json.Unmarshal([]byte(text), &c); err != nil {
			log.Fatal(err)
		}
		ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
		defer stop()
		if err := c.run(ctx); err != nil {
			log.Fatal(err)
		}
		return
	}
	os.Exit(m.Run())
}

// shop is a database with the tables of the handlers, whose names begin with Prefix.
type shop struct {
	Store  string // pgx, stdlib, mysql or sqlite
	DSN    string
	Prefix string

	store inbox.Store
	exec  func(ctx context.Context, query string) error // in the transaction that ctx carries, or without
	count func(ctx context.Context, query string) (int, error)
	setup func(context.Context) error
	close func()
}

// open connects to the database.
func (s *shop) open(ctx context.Context) error {
	if s.Store == "pgx" {
		pool, err := pgxpool.New(ctx, s.DSN)
		if err != nil {
			return err
		}
		store, err := pgxstore.New(pool, pgxstore.Config{Table: s.Prefix + "inbox"})
		if err != nil {
			return err
		}
		s.store, s.setup, s.close = store, store.InitializeSchema, pool.Close
		s.exec = func(ctx context.Context, query string) error {
			_, err := store.Executor(ctx).Exec(ctx, s.named(query))
			return err
		}
		s.count = func(ctx context.Context, query string) (n int, err error) {
			return n, pool.QueryRow(ctx, s.named(query)).Scan(&n)
		}
		return nil
	}
	driver, dialect := "pgx", sqlstore.PostgreSQL
	switch s.Store {
	case "mysql":
		driver, dialect = "mysql", sqlstore.MySQL
	case "sqlite":
		driver, dialect = "sqlite", sqlstore.SQLite
	}
	db, err := sql.Open(driver, s.DSN)
	if err != nil {
		return err
	}
	store, err := sqlstore.New(db, sqlstore.Config{Dialect: dialect, Table: s.Prefix + "inbox"})
	if err != nil {
		return err
	}
	s.store, s.setup, s.close = store, store.InitializeSchema, func() { _ = db.Close() }
	s.exec = func(ctx context.Context, query string) error {
		_, err := store.Executor(ctx).ExecContext(ctx, s.named(query))
		return err
	}
	s.count = func(ctx context.Context, query string) (n int, err error) {
		return n, db.QueryRowContext(ctx, s.named(query)).Scan(&n)
	}
	return nil
}

// named puts the prefix before the tables of a query, which are written as {name}.
func (s *shop) named(query string) string {
	return strings.NewReplacer("{", s.Prefix, "}", "").Replace(query)
}

// create creates the tables.
func (s *shop) create(ctx context.Context) error {
	errs := []error{s.setup(ctx)}
	for _, table := range []string{"effects", "payments", "ledger"} {
		errs = append(errs, s.exec(ctx, "CREATE TABLE {"+table+"} (id VARCHAR(100))"))
	}
	return errors.Join(append(errs,
		s.exec(ctx, "CREATE TABLE {stock} (pieces INTEGER)"), s.exec(ctx, "INSERT INTO {stock} VALUES (0)"))...)
}

// drop drops the tables.
func (s *shop) drop(ctx context.Context) error {
	return s.exec(ctx, "DROP TABLE IF EXISTS {inbox}, {effects}, {payments}, {ledger}, {stock}")
}

// takeFromStock is the handler of the tests, on every broker and every database.
func (s *shop) takeFromStock(msg *message.Message) error {
	return errors.Join(
		s.exec(msg.Context(), "INSERT INTO {effects} VALUES ('"+string(msg.Payload)+"')"),
		s.exec(msg.Context(), "UPDATE {stock} SET pieces = pieces - 1"),
	)
}

// pay and book are the stages of a pipeline.
func (s *shop) pay(msg *message.Message) ([]*message.Message, error) {
	if err := s.exec(msg.Context(), "INSERT INTO {payments} VALUES ('"+string(msg.Payload)+"')"); err != nil {
		return nil, err
	}
	return []*message.Message{message.NewMessage(watermill.NewUUID(), msg.Payload)}, nil
}

func (s *shop) book(msg *message.Message) error {
	return s.exec(msg.Context(), "INSERT INTO {ledger} VALUES ('"+string(msg.Payload)+"')")
}

// wire is the wiring of the tests, on every broker and every database: the recommended stack, with the handlers.
func (s *shop) wire(
	dedup *inbox.Deduplicator, subscriber message.Subscriber, publisher message.Publisher, topics string, handlers ...string,
) (*message.Router, error) {
	router, err := message.NewRouter(message.RouterConfig{CloseTimeout: 10 * time.Second}, watermill.NewStdLogger(false, false))
	if err != nil {
		return nil, err
	}
	poison, err := middleware.PoisonQueueWithFilter(publisher, topics+"poison", dedup.ShouldPoison)
	if err != nil {
		return nil, err
	}
	retry := middleware.Retry{MaxRetries: 5, InitialInterval: 50 * time.Millisecond, ResetContextOnRetry: true}
	router.AddMiddleware(poison, retry.Middleware, middleware.Timeout(20*time.Second), middleware.Recoverer, dedup.Middleware)
	for _, handler := range handlers {
		switch handler {
		case "take_from_stock":
			router.AddConsumerHandler(handler, topics+"orders", subscriber, s.takeFromStock)
		case "pay":
			router.AddHandler(handler, topics+"orders", subscriber, topics+"payments", publisher, s.pay)
		case "book":
			router.AddConsumerHandler(handler, topics+"payments", subscriber, s.book)
		default:
			return nil, fmt.Errorf("no handler %q", handler)
		}
	}
	return router, nil
}

// consumer is a process with handlers of a shop.
type consumer struct {
	Shop     shop
	RabbitMQ string
	Handlers []string

	// DieAt makes the process kill itself at its first publish, "before" or "after" it, unless the file Died is there.
	DieAt, Died string
}

func (c consumer) run(ctx context.Context) error {
	if err := c.Shop.open(context.Background()); err != nil {
		return err
	}
	dedup, err := inbox.NewDeduplicator(inbox.Config{Store: c.Shop.store, ShutdownGrace: 5 * time.Second, Logger: watermill.NewStdLogger(false, false)})
	if err != nil {
		return err
	}
	// watermill-amqp hands out one message at a time per subscription, so it takes several routers to be quick.
	ended := make(chan error)
	const routers = 4
	for range routers {
		go func() { ended <- c.serve(ctx, dedup) }()
	}
	var errs []error
	for range routers {
		errs = append(errs, <-ended)
	}
	flush, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	errs = append(errs, dedup.Close(flush))
	c.Shop.close()
	return errors.Join(errs...)
}

func (c consumer) serve(ctx context.Context, dedup *inbox.Deduplicator) error {
	config := amqpConfig(c.RabbitMQ)
	var subscriber *amqp.Subscriber
	var publisher *amqp.Publisher
	for {
		var err error
		if subscriber, err = amqp.NewSubscriber(config, watermill.NopLogger{}); err == nil {
			if publisher, err = amqp.NewPublisher(config, watermill.NopLogger{}); err == nil {
				break
			}
		}
		select { // the broker may be down for the moment
		case <-ctx.Done():
			return nil
		case <-time.After(100 * time.Millisecond):
		}
	}
	router, err := c.Shop.wire(dedup, subscriber, dying{publisher, c}, c.Shop.Prefix, c.Handlers...)
	if err != nil {
		return err
	}
	return router.Run(ctx)
}

func amqpConfig(url string) amqp.Config {
	config := amqp.NewDurableQueueConfig(url)
	config.Publish.ConfirmDelivery = true
	config.Consume.Qos.PrefetchCount = 10
	return config
}

// dying is a publisher that kills its process.
type dying struct {
	message.Publisher
	consumer
}

func (d dying) Publish(topic string, messages ...*message.Message) error {
	kill := func(when string) {
		if d.DieAt != when {
			return
		}
		if _, err := os.Stat(d.Died); err == nil {
			return
		}
		_ = os.WriteFile(d.Died, nil, 0o600)
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {}
	}
	kill("before")
	err := d.Publisher.Publish(topic, messages...)
	kill("after")
	return err
}
