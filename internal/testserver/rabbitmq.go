package testserver

import (
	"context"
	"fmt"
	"os"
	"strconv"
)

// RabbitMQ starts a RabbitMQ broker.
func RabbitMQ() (*Server, error) {
	server := "/usr/lib/rabbitmq/bin/rabbitmq-server" // what Debian puts into PATH switches users
	if _, err := os.Stat(server); err != nil {
		if server, err = binary("rabbitmq-server"); err != nil {
			return nil, err
		}
	}
	epmd, err := binary("epmd")
	if err != nil {
		return nil, err
	}
	s, ports, err := newServer("rabbitmq", 3, "rabbitmq")
	if err != nil {
		return nil, err
	}
	s.DSN = fmt.Sprintf("amqp://guest:guest@127.0.0.1:%d/", s.Port)
	config := s.path("rabbitmq.conf")
	if err := s.write(map[string]string{config: "disk_free_limit.absolute = 50MB\nlog.file.level = warning\n"}); err != nil {
		s.Remove()
		return nil, err
	}
	// The broker registers with a port mapper of its own; the one that it would start otherwise is the machine's.
	s.helper = []string{epmd, "-address", "127.0.0.1", "-port", strconv.Itoa(ports[2])}
	s.command = []string{server}
	s.env = []string{
		"RABBITMQ_NODENAME=inbox-" + strconv.Itoa(s.Port) + "@localhost",
		"RABBITMQ_NODE_IP_ADDRESS=127.0.0.1",
		"RABBITMQ_NODE_PORT=" + strconv.Itoa(s.Port),
		"RABBITMQ_DIST_PORT=" + strconv.Itoa(ports[1]),
		"ERL_EPMD_PORT=" + strconv.Itoa(ports[2]),
		"ERL_EPMD_ADDRESS=127.0.0.1",
		"RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS=-kernel inet_dist_use_interface {127,0,0,1}",
		"RABBITMQ_MNESIA_BASE=" + s.path("mnesia"),
		"RABBITMQ_LOG_BASE=" + s.path("log"),
		"RABBITMQ_CONFIG_FILE=" + config,
		"RABBITMQ_CONF_ENV_FILE=" + s.path("none"),
		"RABBITMQ_ENABLED_PLUGINS_FILE=" + s.path("enabled_plugins"),
		"RABBITMQ_PID_FILE=" + s.path("rabbitmq.pid"),
		"LANG=C.UTF-8",
	}
	s.ready = func(ctx context.Context) error { return greets(ctx, s.Port, "AMQP\x00\x00\x09\x01") }
	return s.launch()
}
